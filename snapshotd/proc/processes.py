"""What /proc says of a tree of processes, read once: identity, descriptors, file-backed mappings.

Invariant: nothing is opened that the rank has open; links are followed only by stat. A process that vanishes while it
is read is left out and named in `vanished`; it is not an error here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

DELETED = " (deleted)"

#: span, permissions, device, inode, path of every mapping that is not plain anonymous memory
_MAPPING = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) (\S{4}) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) (\d+) +([^\[\s].*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    number: int
    link: str  # as readlink gives it: a path, pipe:[…], socket:[…], anon_inode:…
    writable: bool
    stat: os.stat_result | None  # of what has a path


@dataclass(frozen=True, slots=True)
class Mapping:
    span: str  # its name under map_files
    readable: bool
    writable: bool
    executable: bool
    shared: bool
    device: str
    inode: int
    path: str

    @property
    def start(self) -> int:
        return int(self.span.partition("-")[0], 16)

    @property
    def size_bytes(self) -> int:
        return int(self.span.partition("-")[2], 16) - self.start


@dataclass(
    frozen=True, slots=True, eq=False
)  # a key by identity: hashing all it has open would cost more than reading it
class Process:
    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    threads: int
    user_id: int
    pid_inside: int  # in the innermost pid namespace
    descriptors: tuple[Descriptor, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    cwd: str = ""
    root: str = ""

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass
class Tree:
    """Everything that is in the rank's cgroup, whether it descends from the root or not."""

    root_pid: int
    processes: dict[int, Process] = field(default_factory=dict)
    vanished: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, pids: Sequence[int], root_pid: int) -> Tree:
        tree = cls(root_pid)
        for pid in dict.fromkeys([root_pid, *pids]):
            try:
                tree.processes[pid] = read_process(pid)
            except (FileNotFoundError, ProcessLookupError):
                tree.vanished.append(pid)
        return tree

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.zombie]

    def descends(self, process: Process) -> bool:
        """Whether CRIU, walking children from the root, would find it."""
        seen = set()
        while process.pid != self.root_pid:
            parent = self.processes.get(process.parent)
            if parent is None or process.pid in seen:
                return False
            seen.add(process.pid)
            process = parent
        return True


def read_process(pid: int, under: tuple[str, ...] = ("",)) -> Process:
    """One process, of its descriptors and mappings those whose name begins with one of `under`.

    Raises ProcessLookupError or FileNotFoundError where it is gone.
    """
    identity = read_identity(pid)
    if identity.zombie:
        return identity
    return replace(
        identity,
        descriptors=tuple(read_descriptors(pid, under)),
        mappings=tuple(read_mappings(pid, under)),
        cwd=os.readlink(f"/proc/{pid}/cwd"),
        root=os.readlink(f"/proc/{pid}/root"),
    )


def read_identity(pid: int) -> Process:
    """Who a process is, without what it has open."""
    head, _, tail = read_text(f"/proc/{pid}/stat").rpartition(")")
    fields = tail.split()
    status = read_status(f"/proc/{pid}/status")
    return Process(
        pid=pid,
        name=head.partition("(")[2] or "?",
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        threads=int(fields[17]),
        user_id=int(status["Uid"].split()[0]),
        pid_inside=int(status.get("NSpid", str(pid)).split()[-1]),
    )


def read_text(path: str) -> str:
    with open(path, "rb") as file:
        return os.fsdecode(file.read())


def read_status(path: str) -> dict[str, str]:
    """The `Name: value` lines of a status, smaps_rollup or fdinfo file."""
    lines = (line.partition(":") for line in read_text(path).splitlines())
    return {name: value.strip() for name, _, value in lines}


def read_links(pid: int) -> Iterable[tuple[int, str, int]]:
    """Number, link and directory descriptor of every open descriptor; one closed meanwhile is left out."""
    folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number in os.listdir(folder):
            try:
                yield int(number), os.readlink(number, dir_fd=folder), folder
            except FileNotFoundError:
                continue
    finally:
        os.close(folder)


def read_descriptors(pid: int, under: tuple[str, ...] = ("",)) -> Iterable[Descriptor]:
    for number, link, folder in read_links(pid):
        if not link.startswith(under):
            continue
        try:
            # The link's own permission bits are how /proc shows the mode a descriptor was opened with.
            writable = bool(os.lstat(str(number), dir_fd=folder).st_mode & 0o200)
            stat = os.stat(str(number), dir_fd=folder) if link.startswith("/") else None
        except FileNotFoundError:
            continue
        yield Descriptor(number, link, writable, stat)


def read_mappings(pid: int, under: tuple[str, ...] = ("",)) -> Iterable[Mapping]:
    beginnings = tuple(os.fsencode(beginning) for beginning in under)
    with open(f"/proc/{pid}/maps", "rb") as file:
        text = file.read()
    for span, bits, device, inode, path in _MAPPING.findall(text):
        if not path.startswith(beginnings):
            continue
        yield Mapping(
            span="-".join(end.lstrip("0") or "0" for end in span.decode().split("-")),  # map_files does not pad
            readable=bits[0] == 0x72,
            writable=bits[1] == 0x77,
            executable=bits[2] == 0x78,
            shared=bits[3] == 0x73,
            device=device.decode(),
            inode=int(inode),
            path=os.fsdecode(path.replace(b"\\012", b"\n")),
        )
