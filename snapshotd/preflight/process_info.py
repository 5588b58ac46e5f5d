"""The processes of a rank as /proc shows them, read once: identity, descriptors, named mappings.

A process that ends while it is read is left out and listed in `vanished`; here that is not an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from snapshotd.proc import fuse, maps, stat, status
from snapshotd.proc.fd import Descriptor, read_descriptors
from snapshotd.proc.files import GONE
from snapshotd.proc.maps import Mapping
from snapshotd.proc.status import Status


@dataclass(
    frozen=True, slots=True, eq=False
)  # hashed by identity: hashing all it has open would cost more than reading it
class ProcessInfo:
    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    threads: int
    status: Status
    pid_inside: int  # in the innermost pid namespace
    descriptors: tuple[Descriptor, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    cwd: str = ""
    root: str = ""
    users_devices: frozenset[int] = frozenset()  # file systems that processes of users serve (snapshotd/proc/fuse.py)

    @property
    def user_id(self) -> int:
        return self.status.user_id

    @property
    def zombie(self) -> bool:
        return self.state in "ZXx"

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass
class ProcessTree:
    """Every process in the rank's cgroup, whether it descends from the root process or not."""

    root_pid: int
    processes: dict[int, ProcessInfo] = field(default_factory=dict)
    vanished: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, pids: Sequence[int], root_pid: int) -> ProcessTree:
        tree = cls(root_pid)
        for pid in dict.fromkeys([root_pid, *pids]):
            try:
                tree.processes[pid] = read_process(pid)
            except GONE:
                tree.vanished.append(pid)
        return tree

    @property
    def alive(self) -> list[ProcessInfo]:
        return [process for process in self.processes.values() if not process.zombie]

    def descends(self, process: ProcessInfo) -> bool:
        """Whether CRIU, which walks the children from the root, would find it."""
        seen = set()
        while process.pid != self.root_pid:
            parent = self.processes.get(process.parent)
            if parent is None or process.pid in seen:
                return False
            seen.add(process.pid)
            process = parent
        return True


def read_process(pid: int, prefixes: tuple[str, ...] = ("",)) -> ProcessInfo:
    """One process, with those descriptors and mappings whose name begins with one of `prefixes`.

    Raises ProcessLookupError or FileNotFoundError if it has ended.
    """
    identity = read_identity(pid)
    if identity.zombie:
        return identity
    users_devices = fuse.devices_of_users(pid)
    return replace(
        identity,
        users_devices=users_devices,
        descriptors=tuple(read_descriptors(pid, prefixes, users_devices)),
        mappings=tuple(maps.read(pid, prefixes)),
        cwd=os.readlink(f"/proc/{pid}/cwd"),
        root=os.readlink(f"/proc/{pid}/root"),
    )


def read_identity(pid: int) -> ProcessInfo:
    """One process without its descriptors and mappings."""
    one, more = stat.read(pid), status.read(pid)
    return ProcessInfo(
        pid=pid,
        name=one.name or "?",
        state=one.state,
        parent=one.parent,
        group=one.group,
        session=one.session,
        start_ticks=one.start_ticks,
        threads=one.threads,
        status=more,
        pid_inside=more.inner_pid,
    )
