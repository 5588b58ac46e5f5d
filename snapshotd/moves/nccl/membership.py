"""Finds out which process is a member of which communicator: pure functions over the reports of all nodes.

Invariant: a communicator is known completely: as many members as it has ranks, each rank once. One that is incomplete, or
that a member's shim refuses, is reported as a problem, and nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.inprocess import ncclctl
from snapshotd.moves.record_parts import Member

#: Every communicator's members, by its id.
Membership: TypeAlias = dict[str, list[Member]]


def membership_of(reports: Mapping[str, pb.GateReport], rank_uid: str) -> tuple[Membership, list[str]]:
    """The members of every communicator that the rank is in, and the problems that prevent taking these down."""
    found: Membership = {}
    sizes: dict[str, int] = {}
    mine: set[str] = set()
    why: list[str] = []
    for node, report in reports.items():
        for process in report.processes:
            for comm in process.communicators:
                if comm.creation_waits:
                    continue  # made after the cut, by all of its members
                found.setdefault(comm.id, []).append(Member(node, process.rank_uid, process.pid, comm.rank))
                sizes.setdefault(comm.id, comm.nranks)
                if process.rank_uid == rank_uid:
                    mine.add(comm.id)
                reasons = [*comm.refusals, *filter(None, [comm.unfinished])]
                why += [f"{comm.id} rank {process.rank} on {node}: {each}" for each in reasons]
    problems = [f"communicator {reason}" for reason in why if reason.split()[0] in mine]
    for comm_id in sorted(mine):
        taken = sorted(member.rank for member in found[comm_id])
        if taken != list(range(sizes[comm_id])):
            problems.append(
                f"communicator {comm_id} has {sizes[comm_id]} members, and only {taken} of them are known: every rank of it"
                " must be started with `migrator run`, on a node of the cluster that answers"
            )
    return {comm: found[comm] for comm in mine}, problems


def whole(reports: Mapping[str, pb.GateReport]) -> tuple[Membership, list[str]]:
    """The members of all communicators of a job at its cut, and the problems that prevent taking them down. One whose
    creation waits at the gate is left out: its members make it after the cut."""
    found, sizes = _all_members(reports)
    problems = []
    for node, report in reports.items():
        for process in report.processes:
            for comm in process.communicators:
                reasons = [*comm.refusals, *filter(None, [comm.unfinished])]
                problems += [f"communicator {comm.id} rank {process.rank} on {node}: {why}" for why in reasons]
    return found, [*problems, *_incomplete(found, sizes)]


def down_of(reports: Mapping[str, pb.GateReport]) -> tuple[Membership, list[str]]:
    """The communicators of a job that are down on at least one member and can be built again, and why others cannot be."""
    found, sizes = _all_members(reports)
    down = {
        comm.id
        for report in reports.values()
        for process in report.processes
        for comm in process.communicators
        if comm.state in ncclctl.DOWN
    }
    wanted = {comm: found[comm] for comm in down}
    missing = _incomplete(wanted, sizes)
    broken = {problem.split()[1] for problem in missing}
    return {comm: members for comm, members in wanted.items() if comm not in broken}, missing


def _all_members(reports: Mapping[str, pb.GateReport]) -> tuple[Membership, dict[str, int]]:
    found: Membership = {}
    sizes: dict[str, int] = {}
    for node, report in reports.items():
        for process in report.processes:
            for comm in process.communicators:
                if not comm.creation_waits:
                    found.setdefault(comm.id, []).append(Member(node, process.rank_uid, process.pid, comm.rank))
                    sizes.setdefault(comm.id, comm.nranks)
    return found, sizes


def _incomplete(membership: Membership, sizes: Mapping[str, int]) -> list[str]:
    return [
        f"communicator {comm} has {sizes[comm]} members, and only {taken} of them are there"
        for comm, members in sorted(membership.items())
        if (taken := sorted(member.rank for member in members)) != list(range(sizes[comm]))
    ]


def ended_since(reports: Mapping[str, pb.GateReport], membership: Membership) -> Membership:
    """Those members that have destroyed or aborted their communicator since it was taken down: a destroy does not wait at the
    gate. An id is never used twice in a process."""
    gone = {
        (comm.id, process.rank_uid, process.pid, comm.rank)
        for report in reports.values()
        for process in report.processes
        for comm in process.ended
    }
    found = {
        comm: [member for member in members if (comm, member.rank_uid, member.pid, member.rank) in gone]
        for comm, members in membership.items()
    }
    return {comm: members for comm, members in found.items() if members}


def placed(membership: Membership, rank_uid: str, node: str) -> Membership:
    """The same membership with the moving rank on another node."""
    return {
        comm: [member.at(node) if member.rank_uid == rank_uid else member for member in found]
        for comm, found in membership.items()
    }


def nodes_of(membership: Membership) -> list[str]:
    return sorted({member.node for found in membership.values() for member in found})


def on_node(membership: Membership, node: str) -> tuple[list[str], list[str]]:
    """The communicators that have a member on a node, in the order in which all members build them, and those ranks' uids."""
    comms = sorted(comm for comm, found in membership.items() if any(member.node == node for member in found))
    return comms, sorted({member.rank_uid for comm in comms for member in membership[comm] if member.node == node})


def untried(members: Sequence[Member], gpus: Mapping[str, frozenset[str]]) -> bool:
    """Whether a communicator is built without a first all-reduce. This is so if two members share a GPU, where one kernel may
    block the other for ever, or if one process has several ranks in it, which would have to be tried at once."""
    by_gpu = Counter(gpu for member in members for gpu in gpus.get(member.rank_uid, ()))
    by_process = Counter((member.rank_uid, member.pid) for member in members)
    return any(count > 1 for count in [*by_gpu.values(), *by_process.values()])
