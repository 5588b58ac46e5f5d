"""One inspection of a rank: its process tree as it was read, and what is derived from it once for all checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.objects import Kind, Object, gather, give_names
from snapshotd.preflight.process_info import ProcessTree
from snapshotd.preflight.reports import DriverReport, NcclReports
from snapshotd.preflight.sockets import UnixSockets, by_family, inode_of, unix_sockets_of
from snapshotd.preflight.survey import Survey, survey
from snapshotd.preflight.verdict import guarded
from snapshotd.proc import stat
from snapshotd.proc.files import GONE

P = ParamSpec("P")

#: How often a check is tried on a rank whose processes end while they are looked at.
LOOKS = 10


@dataclass
class Inspection:
    pids: Sequence[int]
    root_pid: int
    carry_paths: Sequence[str]
    keeper_pid: int = 0
    keeper_is_guest: bool = False
    criu_version: str = ""
    gpu: DriverReport | None = None  # None: no process of the tree holds CUDA
    nccl: NcclReports | None = None  # None: no process of the tree was asked
    frozen: bool = False  # nothing that it has can change
    holds: bool = False  # its device memory may stay on its GPU until it is sent

    @functools.cached_property
    def tree(self) -> ProcessTree:
        return ProcessTree.read(self.pids, self.root_pid)

    @functools.cached_property
    def objects(self) -> list[Object]:
        found = gather(self.tree.alive)
        give_names(found, self.carry_paths, self.root_pid)
        return found

    @functools.cached_property
    def sockets(self) -> dict[str, list[tuple[Object, str]]]:
        return by_family(self.objects)

    @functools.cached_property
    def survey(self) -> Survey:
        return survey(self.tree, self.objects, self.carry_paths, self.bound_names)

    @functools.cached_property
    def unix(self) -> UnixSockets:
        """All unix sockets of the rank's network namespace."""
        return unix_sockets_of(self.tree.root_pid)

    @functools.cached_property
    def bound_names(self) -> list[str]:
        """The names that this tree's unix sockets are bound to."""
        ours = [inode_of(thing) for thing, _ in self.sockets["unix"]]
        return [self.unix.names[inode] for inode in ours if inode in self.unix.names]

    @property
    def inside(self) -> set[int]:
        """The pids of the tree."""
        return set(self.tree.processes)

    def read_again(self) -> None:
        """Forgets what was read, so that the next check reads the processes that are still there."""
        for name in ("tree", "objects", "sockets", "survey", "unix", "bound_names"):
            self.__dict__.pop(name, None)

    def has_ended_processes(self) -> bool:
        """Whether a process has ended since it was read."""
        for process in self.tree.alive:
            try:
                now = stat.read(process.pid)
            except GONE:
                return True
            if now.state in "ZXx" or now.start_ticks != process.start_ticks:
                return True
        return False

    def of_kind(self, *kinds: Kind) -> list[Object]:
        return [thing for thing in self.objects if thing.kind in kinds]


def examined(
    name: str,
    check: Callable[Concatenate[Inspection, P], Check],
    rank: Inspection,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Check:
    """The check's verdict on a running rank; never raises. A process that ends during the check is no reason to refuse: the
    check is tried again without it. Jobs start programs that live for milliseconds. One that is just ending can also be read,
    but without its namespaces, descriptors and mappings."""
    for _ in range(LOOKS):
        try:
            verdict = check(rank, *args, **kwargs)
            if verdict.verdict != Check.REFUSE or not rank.has_ended_processes():
                return verdict
            rank.read_again()
        except GONE:
            rank.read_again()
        except Exception:  # noqa: BLE001 - the same check fails below, and refuses
            break
    return guarded(name, check, rank, *args, **kwargs)
