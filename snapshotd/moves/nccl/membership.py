"""Who is a member of which communicator: pure functions over the reports of all nodes.

Invariant: a communicator is known whole or not at all: as many seats as it has ranks, each taken once. What is not whole, or
what a member's shim refuses, is a problem in words, and nothing is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from snapshotd.api import snapshotd_pb2 as pb


@dataclass(frozen=True)
class Seat:
    """One member: the process that has `rank` in the communicator."""

    node: str
    rank_uid: str
    pid: int  # in the rank's own pid namespace
    rank: int

    def to_note(self) -> list[Any]:
        return [self.node, self.rank_uid, self.pid, self.rank]

    @classmethod
    def from_note(cls, note: Sequence[Any]) -> Seat:
        return cls(*note)

    def at(self, node: str) -> Seat:
        return replace(self, node=node)


#: Every communicator's members, by its id.
Seats: TypeAlias = dict[str, list[Seat]]


def seats_of(reports: Mapping[str, pb.GateReport], rank_uid: str) -> tuple[Seats, list[str]]:
    """The members of every communicator that the rank is in, and what speaks against taking these down."""
    found: Seats = {}
    sizes: dict[str, int] = {}
    mine: set[str] = set()
    why: list[str] = []
    for node, report in reports.items():
        for process in report.processes:
            for comm in process.communicators:
                if comm.creation_waits:
                    continue  # made after the cut, by all of its members
                found.setdefault(comm.id, []).append(Seat(node, process.rank_uid, process.pid, comm.rank))
                sizes.setdefault(comm.id, comm.nranks)
                if process.rank_uid == rank_uid:
                    mine.add(comm.id)
                words = [*comm.refusals, *filter(None, [comm.unfinished])]
                why += [f"{comm.id} rank {process.rank} on {node}: {each}" for each in words]
    problems = [f"communicator {words}" for words in why if words.split()[0] in mine]
    for comm_id in sorted(mine):
        taken = sorted(seat.rank for seat in found[comm_id])
        if taken != list(range(sizes[comm_id])):
            problems.append(
                f"communicator {comm_id} has {sizes[comm_id]} members, and only {taken} of them are known: every rank of it"
                " must be started with `migrator run`, on a node of the cluster that answers"
            )
    return {comm: found[comm] for comm in mine}, problems


def untried(seats: Sequence[Seat], gpus: Mapping[str, frozenset[str]]) -> bool:
    """Whether a communicator is built without a first all-reduce: two members share a GPU, where one kernel may never let the
    other run, or one process has several seats, which would have to be tried at once."""
    by_gpu = Counter(gpu for seat in seats for gpu in gpus.get(seat.rank_uid, ()))
    by_process = Counter((seat.rank_uid, seat.pid) for seat in seats)
    return any(count > 1 for count in [*by_gpu.values(), *by_process.values()])
