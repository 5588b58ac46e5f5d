"""What is looked at again once the tree is frozen: inside the pause, so it takes milliseconds.

The rank ran on after preflight and may have opened anything. Nothing here reads the content of files.
"""

from __future__ import annotations

import ctypes
import os
import stat as mode_of
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.preflight import connections, processes
from snapshotd.preflight.look import Look
from snapshotd.preflight.objects import Kind, is_carried, kind_of
from snapshotd.preflight.source import SOURCE_CHECKS
from snapshotd.preflight.verdict import guarded, listed, passed, plain, refused, warned
from snapshotd.proc.processes import Process, Tree, read_descriptors, read_mappings, read_process

_SYS_PIDFD_GETFD = 438  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Carried:
    """The node-local files a tree has: directories first, parents before children, then files and FIFOs."""

    facts: list[FileFact] = field(default_factory=list)
    #: Of files whose name was removed: that name -> the one they travel under, which is among `facts`.
    other_names: dict[str, str] = field(default_factory=dict)


def list_carried(pids: Sequence[int], carry_paths: Sequence[str]) -> Carried:
    """The node-local files a frozen tree has now.

    `pids` as for inspect_rank. Raises OSError where /proc does: whoever asks has the tree frozen and must know.
    """
    under = (*(folder.rstrip("/") + "/" for folder in carry_paths), "socket:[")
    found = {process.pid: process for process in (_read(pid, under) for pid in pids) if process is not None}
    if not found:
        return Carried()
    look = Look(pids, next(iter(found)), carry_paths)
    look.tree = Tree(look.root_pid, found)
    return Carried(
        [fact for fact in look.survey.facts if fact.carried],
        {thing.removed_name: thing.other_name for thing in look.objects if thing.other_name},
    )


def _read(pid: int, under: tuple[str, ...]) -> Process | None:
    try:
        process = read_process(pid, under)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if process.zombie else process


def recheck(pids: Sequence[int], facts: RankFacts, *, carry_paths: Sequence[str], keeper_pid: int) -> list[Check]:
    """What may have changed since `facts` were gathered; never raises. A refusal means: undo, the rank goes on."""
    look = Look(pids, facts.rank.process.pid, carry_paths, keeper_pid)
    alive = guarded("rank-alive", processes.rank_alive, look)
    if alive.verdict == Check.REFUSE:
        return [alive]
    return [
        alive,
        *(guarded(name, check, look) for name, check in RECHECKS.items()),
        guarded("unix-sockets", connections.unix_sockets, look, thorough=False),
        guarded("new-files", new_files, look, facts),
    ]


#: The source's checks that a moment of running can turn, and that cost no pass over the whole node.
RECHECKS: dict[str, Callable[[Look], Check]] = {
    name: SOURCE_CHECKS[name]
    for name in (
        "process-tree",
        "open-files",
        "deleted-files",
        "gpu-descriptors",  # the driver's checkpoint has closed what was a CUDA process's
        "devices",
        "terminals",
        "io-uring",
        "kernel-objects",
        "file-locks",
        "other-sockets",
        "sysv-memory",
    )
}


def new_files(look: Look, facts: RankFacts) -> Check:
    """Files the target was not asked about. A mapped one could silently differ there; an open one CRIU checks."""
    known = {fact.path for fact in facts.files}
    new = [fact for fact in look.survey.facts if not fact.carried and fact.path not in known]
    if mapped := [fact.path for fact in new if fact.mapped]:
        return refused(
            "new-files", f"mapped since preflight, not compared with the target: {listed(mapped)}", "try again"
        )
    if new:
        return warned(
            "new-files",
            f"opened since preflight, not looked for on the target: {listed([fact.path for fact in new])}",
            "if the restore fails for one of them, try again: it will then be checked before the freeze",
        )
    return passed("new-files", "none")


def sync_files(pids: Sequence[int], *, carry_paths: Sequence[str] = ()) -> list[str]:
    """Flush every regular file the tree can write to, so that the target reads what the rank wrote.

    Files under `carry_paths` are left out: they are read on this node, and a disk would only lengthen the pause.
    Answers the problems in words. The rank's own descriptor is borrowed (pidfd_getfd) rather than the file opened
    again: on NFS root may not open what the rank could.
    """
    problems = []
    synced: set[tuple[int, int]] = set()
    for pid in pids:
        try:
            for what, inode, reopen in _writable_files(pid):
                if inode in synced or is_carried(what, carry_paths):
                    continue
                synced.add(inode)
                try:
                    _sync(reopen())
                except OSError as error:
                    problems.append(plain(f"{what}: {error.strerror}"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended, and the kernel closed what it had
        except OSError as error:
            problems.append(plain(f"pid {pid}: {error}"))
    return problems


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _writable_files(pid: int) -> Iterator[tuple[str, tuple[int, int], Callable[[], int]]]:
    """Name, inode and a way to get a handle of each writable regular file: by descriptors, then by mappings."""
    for descriptor in read_descriptors(pid):
        stat = descriptor.stat
        if stat is not None and descriptor.writable and _needs_sync(descriptor.link, stat):
            yield descriptor.link, (stat.st_dev, stat.st_ino), partial(_borrow, pid, descriptor.number)
    for mapping in read_mappings(pid):
        if mapping.shared and mapping.writable and mapping.path.startswith("/"):
            path = f"/proc/{pid}/map_files/{mapping.span}"
            stat = os.stat(path)
            if _needs_sync(mapping.path, stat):
                yield mapping.path, (stat.st_dev, stat.st_ino), partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC)


def _needs_sync(link: str, stat: os.stat_result) -> bool:
    """Named regular files; shared memory and unlinked files have no place to be written to."""
    return kind_of(link, stat) is Kind.FILE and mode_of.S_ISREG(stat.st_mode) and not link.startswith("/dev/shm/")


def _borrow(pid: int, number: int) -> int:
    pidfd = os.pidfd_open(pid)
    try:
        handle: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
        if handle < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return handle
    finally:
        os.close(pidfd)
