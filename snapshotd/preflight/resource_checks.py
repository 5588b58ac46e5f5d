"""Checks of what the processes have open or mapped, other than sockets and named files."""

from __future__ import annotations

import os
import re

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind, Object, is_carried
from snapshotd.preflight.outsiders import Held, find_outsiders
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.fd import read_info, read_links
from snapshotd.proc.files import GONE

#: Devices without state, by (major, minor).
_HARMLESS = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}  # null zero full random urandom tty ptmx
_PTS_MAJORS = range(136, 144)

#: anon_inodes that CRIU can dump. Everything else is refused by name, since what a new kernel adds is not known to be safe.
_CARRIED_ANON = {"[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[pidfd]"}
_IO_URING = "anon_inode:[io_uring]"
_PIDFD = re.compile(r"^(anon_inode:\[pidfd\]|pidfd:\[\d+\])$")


def devices(rank: Inspection) -> Check:
    """All devices but those of GPUs (gpu-descriptors) and RDMA (rdma)."""
    found = [thing for thing in rank.of_kind(Kind.DEVICE) if not _is_movable(thing)]
    if found:
        return refused(
            "devices",
            f"the rank has devices open whose state cannot be moved: {listed([str(thing) for thing in found])}",
            "close the device before the move",
        )
    return passed("devices", "only null, zero, full, random, urandom and terminals")


def _is_movable(thing: Object) -> bool:
    if thing.stat is None:
        return False
    major, minor = os.major(thing.stat.st_rdev), os.minor(thing.stat.st_rdev)
    return (major, minor) in _HARMLESS or _is_terminal(thing)


def _is_terminal(thing: Object) -> bool:
    return thing.stat is not None and os.major(thing.stat.st_rdev) in _PTS_MAJORS and thing.path.startswith("/dev/pts")


def terminals(rank: Inspection) -> Check:
    """A terminal can be moved if its master is the keeper's or inside the tree."""
    slaves = [thing for thing in rank.of_kind(Kind.DEVICE) if _is_terminal(thing)]
    if not slaves:
        return passed("terminals", "none")
    masters = {index for pid in [*rank.inside, rank.keeper_pid] if pid for index in _terminal_masters(pid)}
    found = [str(thing) for thing in slaves if thing.path.rpartition("/")[2] not in masters]
    if found:
        return refused(
            "terminals",
            f"the rank has terminals open that belong to processes outside it: {listed(found)}",
            "start the job with `migrator run`, which gives it a terminal that can be moved; redirect others (`</dev/null`)",
        )
    return passed("terminals", f"{len(slaves)}, of the keeper or inside the rank")


def _terminal_masters(pid: int) -> list[str]:
    try:
        numbers = [number for number, link, _ in read_links(pid) if link.endswith("/ptmx")]
        return [read_info(pid, number).tty_index for number in numbers]
    except GONE:
        return []


def io_uring(rank: Inspection) -> Check:
    found = [str(thing) for thing in rank.of_kind(Kind.ANON) if thing.link == _IO_URING]
    if found:
        return refused(
            "io-uring",
            f"the rank uses io_uring, which CRIU cannot dump: {listed(found)}",
            "start the rank with `migrator run`: `migrator run` denies io_uring through the preloaded shim, so that libraries"
            " use other interfaces; for a statically linked program set kernel.io_uring_disabled=2",
        )
    return passed("io-uring", "not in use")


def kernel_objects(rank: Inspection) -> Check:
    things = [thing for thing in rank.of_kind(Kind.ANON) if thing.link != _IO_URING]
    found = [str(thing) for thing in things if not _is_carried_anon(thing, rank)]
    if found:
        return refused(
            "kernel-objects",
            "the rank has kernel objects open that CRIU cannot dump, or that refer to a process outside the rank:"
            f" {listed(found)}",
            "close them before the move (perf events of a profiler, BPF, userfaultfd, KVM, namespace handles …)",
        )
    return passed("kernel-objects", f"{len(things)} event, timer, signal and watch descriptors")


def _is_carried_anon(thing: Object, rank: Inspection) -> bool:
    if not _PIDFD.match(thing.link):
        return thing.link.removeprefix("anon_inode:") in _CARRIED_ANON
    process, number = next(iter(thing.holders.items()))
    watched = read_info(process.pid, number).watched_pid
    return watched is None or watched == -1 or watched in rank.inside


def pipes(rank: Inspection) -> Check:
    ours = rank.of_kind(Kind.PIPE)
    fifos = rank.of_kind(Kind.FIFO)
    keeper = {link for _, link, _ in read_links(rank.keeper_pid)} if rank.keeper_pid else set()
    links = {thing.link: thing for thing in ours if thing.link not in keeper}
    if not links and not fifos:
        return passed("pipes", f"{len(ours)}, to the keeper" if ours else "none")
    holders = find_outsiders(rank.inside, links.keys(), fifos)
    named: dict[Held, Object] = {thing.inode: thing for thing in fifos}
    named.update(links)
    found = [f"{named[held]} — {outside[0]}" for held, outside in holders.items()]
    if found:
        return refused(
            "pipes",
            f"the rank has pipes to processes outside it: {listed(found)}",
            "close inherited pipes before starting the job (a make jobserver, a shell's process substitution)",
        )
    return passed("pipes", f"{len(ours) + len(fifos)}, inside the rank or to the keeper")


def shared_memory(rank: Inspection) -> Check:
    """Memory that a process outside the rank also maps or has open would become two memories with the move."""
    memory = {thing.inode: thing for thing in rank.objects if _is_own_memory(thing, rank)}
    if not memory:
        return passed("shared-memory", "none")
    holders = {inode: outside[0] for inode, outside in find_outsiders(rank.inside, (), memory.values()).items()}
    shared = [(thing, holders[inode]) for inode, thing in memory.items() if inode in holders]
    broken = [f"{thing} — {outside}" for thing, outside in shared if _is_broken_by_move(thing)]
    if broken:
        return refused(
            "shared-memory",
            f"the rank shares memory with processes outside it: {listed(broken)}",
            "end the other processes, or start them inside the job",
        )
    if shared:
        return warned(
            "shared-memory",
            "processes outside the rank have the same node-local files open: "
            + listed([f"{thing} — {outside}" for thing, outside in shared]),
            "the rank's copy is moved with it, so the two will differ; put shared files on a shared file system",
        )
    size = sum(thing.blocks_bytes for thing in memory.values())
    return passed("shared-memory", f"{len(memory)} objects, {size >> 20} MiB, inside the rank only")


def _is_own_memory(thing: Object, rank: Inspection) -> bool:
    """What the rank can write to and is moved with it."""
    if rank.nccl is not None and rank.nccl.reports and thing.path.startswith("/dev/shm/nccl-"):
        return False  # removed with the communicators, before the freeze
    if thing.kind is Kind.FILE:
        return thing.writable and is_carried(thing.path, rank.carry_paths)
    return thing.kind is Kind.MEMORY or (thing.kind is Kind.GHOST and thing.writable)


def _is_broken_by_move(thing: Object) -> bool:
    """A log in /tmp that two processes append to only differs afterwards; shared memory no longer works."""
    return thing.kind is not Kind.FILE or thing.shared or thing.path.startswith("/dev/shm/")


def sysv_memory(rank: Inspection) -> Check:
    found = [str(thing) for thing in rank.of_kind(Kind.SYSV)]
    if found:
        return refused(
            "sysv-memory",
            f"the rank uses System V shared memory, which belongs to the node: {listed(found)}",
            "use POSIX shared memory (shm_open, memfd_create) instead",
        )
    return passed("sysv-memory", "none")


def huge_pages(rank: Inspection) -> Check:
    found = rank.of_kind(Kind.HUGE)
    if found:
        return warned(
            "huge-pages",
            f"the rank has {len(found)} mappings of reserved huge pages",
            "reserve as many on the target (vm.nr_hugepages); transparent huge pages need nothing",
        )
    return passed("huge-pages", "none reserved")


def async_io(rank: Inspection) -> Check:
    found = rank.of_kind(Kind.AIO)
    if found:
        return warned(
            "async-io",
            f"the rank has {len(found)} kernel AIO contexts",
            "CRIU can dump them if no request is in progress at the freeze; otherwise the move is undone and can be retried",
        )
    return passed("async-io", "none")
