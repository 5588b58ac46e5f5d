"""One inspection of a rank: its process tree as it was read, and what is derived from it once for all checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotd.preflight.objects import Kind, Object, gather, give_names
from snapshotd.preflight.process_info import ProcessTree
from snapshotd.preflight.reports import DriverReport, NcclReports
from snapshotd.preflight.sockets import UnixSockets, by_family, inode_of, unix_sockets_of
from snapshotd.preflight.survey import Survey, survey


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

    def of_kind(self, *kinds: Kind) -> list[Object]:
        return [thing for thing in self.objects if thing.kind in kinds]
