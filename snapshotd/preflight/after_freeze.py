"""The checks that are repeated once the tree is frozen. This is part of the pause, so it takes milliseconds.

The rank kept running after preflight and may have opened anything. The only files whose content is read are those that it
has mapped since, for at most DIGEST_SECONDS.
"""

from __future__ import annotations

import ctypes
import os
import stat as mode_of
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.files.held import Held
from snapshotd.preflight import process_checks, socket_checks
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind, is_carried, kind_of
from snapshotd.preflight.process_info import ProcessInfo, ProcessTree, read_process
from snapshotd.preflight.source import SOURCE_CHECKS, look_at_place
from snapshotd.preflight.survey import add_digests
from snapshotd.preflight.verdict import guarded, listed, passed, plain, refusals, warned
from snapshotd.proc import maps
from snapshotd.proc.fd import read_descriptors
from snapshotd.proc.files import GONE
from snapshotd.proc.pidfd import open_pidfd

DIGEST_SECONDS = 1.0
_SYS_PIDFD_GETFD = 438  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Carried:
    """The node-local files that a tree has: directories first, parents before children, then files and FIFOs."""

    facts: list[FileFact] = field(default_factory=list)
    #: Of files whose name was removed: that name -> the name under which they are moved, which is among `facts`.
    other_names: dict[str, str] = field(default_factory=dict)
    #: The regular files among `facts`, by their paths, as the rank itself has them.
    held: dict[str, Held] = field(default_factory=dict)


def list_carried(pids: Sequence[int], carry_paths: Sequence[str]) -> Carried:
    """The node-local files that a frozen tree has now.

    `pids` as for inspect_rank. OSError from /proc is passed on: the caller has frozen the tree and must know.
    """
    prefixes = (*(folder.rstrip("/") + "/" for folder in carry_paths), "socket:[")
    found = {process.pid: process for process in (_read(pid, prefixes) for pid in pids) if process is not None}
    if not found:
        return Carried()
    rank = Inspection(pids, next(iter(found)), carry_paths)
    rank.tree = ProcessTree(rank.root_pid, found)
    facts = [fact for fact in rank.survey.facts if fact.carried]
    return Carried(
        facts,
        {thing.removed_name: thing.other_name for thing in rank.objects if thing.other_name},
        {fact.path: rank.survey.held[fact.path] for fact in facts if mode_of.S_ISREG(fact.mode)},
    )


def _read(pid: int, prefixes: tuple[str, ...]) -> ProcessInfo | None:
    try:
        process = read_process(pid, prefixes)
    except GONE:
        return None
    return None if process.zombie else process


@dataclass
class Rechecked:
    checks: list[Check]
    #: Files that the rank has mapped since preflight, with digests. The target compares them before it restores the rank.
    new_files: list[FileFact] = field(default_factory=list)


def recheck(
    pids: Sequence[int],
    facts: RankFacts,
    *,
    carry_paths: Sequence[str],
    keeper_pid: int,
    keeper_is_guest: bool = False,
) -> Rechecked:
    """Checks what may have changed since `facts` were gathered; never raises. After a refusal the move must be undone."""
    rank = Inspection(pids, facts.rank.process.pid, carry_paths, keeper_pid, keeper_is_guest, frozen=True)
    alive = guarded("rank-alive", process_checks.rank_alive, rank)
    if alive.verdict == Check.REFUSE:
        return Rechecked([alive])
    place = look_at_place(rank)
    if refusals(place):
        return Rechecked([alive, *place])
    new: list[FileFact] = []
    checks = [
        alive,
        *place,
        *(guarded(name, check, rank) for name, check in RECHECKS.items()),
        guarded("unix-sockets", socket_checks.unix_sockets, rank, thorough=False),
        guarded("new-files", _new_files, rank, facts, new),
    ]
    return Rechecked(checks, new)


#: The source's checks whose result may have changed, and that need no pass over all processes of the node.
#:
#: Not repeated: kernel and criu, which a rank cannot change; keeper, whose end ends the move by itself; stopped,
#: security-label, node-local-files, huge-pages and async-io, which only warn; tracing, because criu cannot seize a traced
#: process; pipes and shared-memory, because they need the pass over all processes, and a rank that shares either with a
#: process outside harms only itself; and the GPU and NCCL checks, which the freeze itself enforces.
RECHECKS: dict[str, Callable[[Inspection], Check]] = {
    name: SOURCE_CHECKS[name]
    for name in (  # and those of `look_at_place`
        "credentials",
        "process-tree",
        "session",
        "open-files",
        "deleted-files",
        "gpu-descriptors",  # the driver's checkpoint has closed those of CUDA processes
        "devices",
        "rdma",  # the shim has closed those of NCCL
        "terminals",
        "io-uring",
        "kernel-objects",
        "file-locks",
        "other-sockets",
        "sysv-memory",
    )
}


def _new_files(rank: Inspection, facts: RankFacts, mapped: list[FileFact]) -> Check:
    """Adds to `mapped` what the rank has mapped since preflight, say the program of a child that lives for milliseconds. Such
    a file could differ on the target unnoticed, so the target compares it; CRIU itself checks one that is only open."""
    known = {fact.path for fact in facts.files}
    new = [fact for fact in rank.survey.facts if not fact.carried and fact.path not in known]
    mapped += [fact for fact in new if fact.mapped]
    add_digests(mapped, rank.survey.held, DIGEST_SECONDS)
    if new:
        return warned(
            "new-files",
            "the rank has opened or mapped files since preflight; the target compares them only now:"
            f" {listed([fact.path for fact in new])}",
            "if the restore fails because of one of them, retry: preflight will then include it",
        )
    return passed("new-files", "none")


def sync_files(pids: Sequence[int], *, carry_paths: Sequence[str] = ()) -> list[str]:
    """Flushes every regular file that the tree can write to, so that the target reads what the rank wrote.

    Returns a description of each failure. Files under `carry_paths` are left out: they are read on this node, and writing
    them to disk would only lengthen the pause. The rank's own descriptor is duplicated (pidfd_getfd) instead of opening
    the file again, because on NFS root may not be allowed to open it.
    """
    problems = []
    synced: set[tuple[int, int]] = set()
    for pid in pids:
        try:
            for path, inode, reopen in _writable_files(pid):
                if inode in synced or is_carried(path, carry_paths):
                    continue
                synced.add(inode)
                try:
                    _sync(reopen())
                except OSError as error:
                    problems.append(plain(f"{path}: {error.strerror}"))
        except GONE:
            continue  # it has ended, and the kernel has closed its files
        except OSError as error:
            problems.append(plain(f"pid {pid}: {error}"))
    return problems


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _writable_files(pid: int) -> Iterator[tuple[str, tuple[int, int], Callable[[], int]]]:
    """Path, inode and a function that opens each writable regular file: first descriptors, then mappings."""
    for descriptor in read_descriptors(pid):
        stat = descriptor.stat
        if stat is not None and descriptor.writable and _needs_sync(descriptor.link, stat):
            yield descriptor.link, (stat.st_dev, stat.st_ino), partial(_duplicate, pid, descriptor.number)
    for mapping in maps.read(pid):
        if mapping.shared and mapping.writable and mapping.path.startswith("/"):
            path = maps.map_file(pid, mapping)
            stat = os.stat(path)
            if _needs_sync(mapping.path, stat):
                yield mapping.path, (stat.st_dev, stat.st_ino), partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC)


def _needs_sync(link: str, stat: os.stat_result) -> bool:
    """Whether this is a regular file with a name. Shared memory and unlinked files are not on a disk."""
    return kind_of(link, stat) is Kind.FILE and mode_of.S_ISREG(stat.st_mode) and not link.startswith("/dev/shm/")


def _duplicate(pid: int, number: int) -> int:
    pidfd = open_pidfd(pid)
    try:
        handle: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
        if handle < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return handle
    finally:
        os.close(pidfd)
