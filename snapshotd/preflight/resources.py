"""Checks of what the processes have open or mapped, other than sockets and named files."""

from __future__ import annotations

import os
import re

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.look import Look
from snapshotd.preflight.objects import Kind, Object, is_carried
from snapshotd.preflight.outsiders import Held, find_outsiders
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.processes import read_links, read_status

#: Devices with no state of their own, by (major, minor).
_HARMLESS = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}  # null zero full random urandom tty ptmx
_PTS_MAJORS = range(136, 144)
NETWORK_DEVICE = re.compile(r"^/dev/(infiniband/|gdrdrv|hfi1|cxi)")

#: anon_inodes that CRIU carries. Everything else is refused by name: a new kernel's invention is not known to be safe.
_CARRIED_ANON = {"[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[pidfd]"}
_IO_URING = "anon_inode:[io_uring]"
_PIDFD = re.compile(r"^(anon_inode:\[pidfd\]|pidfd:\[\d+\])$")


def devices(look: Look) -> Check:
    """All but a GPU's, which gpu.py names; and the network's of a GPU rank, which need another remedy there."""
    found = [thing for thing in look.of_kind(Kind.DEVICE) if not _is_movable(thing)]
    network = any(NETWORK_DEVICE.match(thing.path) for thing in found)
    if look.gpu is not None:
        found = [thing for thing in found if not NETWORK_DEVICE.match(thing.path)]
    if found:
        return refused(
            "devices",
            f"devices whose state cannot be moved: {listed([str(thing) for thing in found])}",
            "turn RDMA off for the job (NCCL_IB_DISABLE=1)" if network else "close the device before the move",
        )
    return passed("devices", "only null, zero, full, random, urandom and terminals")


def _is_movable(thing: Object) -> bool:
    if thing.stat is None:
        return False
    major, minor = os.major(thing.stat.st_rdev), os.minor(thing.stat.st_rdev)
    return (major, minor) in _HARMLESS or _is_terminal(thing)


def _is_terminal(thing: Object) -> bool:
    return thing.stat is not None and os.major(thing.stat.st_rdev) in _PTS_MAJORS and thing.path.startswith("/dev/pts")


def terminals(look: Look) -> Check:
    """A terminal moves when its other end does: the keeper's, or a pair inside the tree."""
    slaves = [thing for thing in look.of_kind(Kind.DEVICE) if _is_terminal(thing)]
    if not slaves:
        return passed("terminals", "none")
    masters = {index for pid in [*look.inside, look.keeper_pid] if pid for index in _terminal_masters(pid)}
    found = [str(thing) for thing in slaves if thing.path.rpartition("/")[2] not in masters]
    if found:
        return refused(
            "terminals",
            f"terminals that belong to somebody outside the rank: {listed(found)}",
            "start the job with `migrator run`, which gives it a terminal that moves; close others (`</dev/null`)",
        )
    return passed("terminals", f"{len(slaves)}, of the keeper or inside the rank")


def _terminal_masters(pid: int) -> list[str]:
    try:
        numbers = [number for number, link, _ in read_links(pid) if link.endswith("/ptmx")]
        return [read_status(f"/proc/{pid}/fdinfo/{number}").get("tty-index", "") for number in numbers]
    except (FileNotFoundError, ProcessLookupError):
        return []


def io_uring(look: Look) -> Check:
    found = [str(thing) for thing in look.of_kind(Kind.ANON) if thing.link == _IO_URING]
    if found:
        return refused(
            "io-uring",
            f"io_uring is in use, which CRIU cannot dump: {listed(found)}",
            "`migrator run` denies io_uring so that libraries fall back: start the rank with it, the shim preloaded"
            " (a statically linked program is not reached: set kernel.io_uring_disabled=2)",
        )
    return passed("io-uring", "not in use")


def kernel_objects(look: Look) -> Check:
    things = [thing for thing in look.of_kind(Kind.ANON) if thing.link != _IO_URING]
    found = [str(thing) for thing in things if not _is_carried_anon(thing, look)]
    if found:
        return refused(
            "kernel-objects",
            f"kernel objects that CRIU cannot carry, or that watch a process outside: {listed(found)}",
            "close them before the move (a profiler's perf events, BPF, userfaultfd, KVM, namespace handles …)",
        )
    return passed("kernel-objects", f"{len(things)} event, timer, signal and watch descriptors")


def _is_carried_anon(thing: Object, look: Look) -> bool:
    if not _PIDFD.match(thing.link):
        return thing.link.removeprefix("anon_inode:") in _CARRIED_ANON
    process, number = next(iter(thing.holders.items()))
    watched = int(read_status(f"/proc/{process.pid}/fdinfo/{number}").get("Pid", "-1"))
    return watched == -1 or watched in look.inside  # -1: that process has ended


def pipes(look: Look) -> Check:
    ours = look.of_kind(Kind.PIPE)
    fifos = look.of_kind(Kind.FIFO)
    keeper = {link for _, link, _ in read_links(look.keeper_pid)} if look.keeper_pid else set()
    links = {thing.link: thing for thing in ours if thing.link not in keeper}
    if not links and not fifos:
        return passed("pipes", f"{len(ours)}, of the keeper or none")
    holders = find_outsiders(look.inside, links.keys(), fifos)
    named: dict[Held, Object] = {thing.inode: thing for thing in fifos}
    named.update(links)
    found = [f"{named[held]} — {who[0]}" for held, who in holders.items()]
    if found:
        return refused(
            "pipes",
            f"pipes to processes outside the rank: {listed(found)}",
            "close inherited pipes before starting the job (a make jobserver, a shell's process substitution)",
        )
    return passed("pipes", f"{len(ours) + len(fifos)}, inside the rank or of the keeper")


def shared_memory(look: Look) -> Check:
    """Memory that a process outside also maps or has open would be two memories after a move."""
    memory = {thing.inode: thing for thing in look.objects if _is_own_memory(thing, look)}
    if not memory:
        return passed("shared-memory", "none")
    holders = {inode: who[0] for inode, who in find_outsiders(look.inside, (), memory.values()).items()}
    shared = [(thing, holders[inode]) for inode, thing in memory.items() if inode in holders]
    torn = [f"{thing} — {who}" for thing, who in shared if _is_torn(thing)]
    if torn:
        return refused(
            "shared-memory",
            f"shared with processes outside the rank: {listed(torn)}",
            "end the other process, or start it inside the job",
        )
    if shared:
        return warned(
            "shared-memory",
            "node-local files that processes outside the rank also have open: "
            + listed([f"{thing} — {who}" for thing, who in shared]),
            "the rank's copy goes with it and the two will differ; keep shared files on a shared file system",
        )
    size = sum(thing.blocks_bytes for thing in memory.values())
    return passed("shared-memory", f"{len(memory)} objects, {size >> 20} MiB, inside the rank alone")


def _is_own_memory(thing: Object, look: Look) -> bool:
    """What the rank can write to and takes along."""
    if look.nccl is not None and look.nccl.reports and thing.path.startswith("/dev/shm/nccl-"):
        return False  # goes with the communicators, before the freeze
    if thing.kind is Kind.FILE:
        return thing.writable and is_carried(thing.path, look.carry_paths)
    return thing.kind is Kind.MEMORY or (thing.kind is Kind.GHOST and thing.writable)


def _is_torn(thing: Object) -> bool:
    """A log in /tmp that two append to only differs afterwards; memory that two share is broken."""
    return thing.kind is not Kind.FILE or thing.shared or thing.path.startswith("/dev/shm/")


def sysv_memory(look: Look) -> Check:
    found = [str(thing) for thing in look.of_kind(Kind.SYSV)]
    if found:
        return refused(
            "sysv-memory",
            f"System V shared memory: {listed(found)}",
            "it belongs to the node, not to the rank: use POSIX shared memory (shm_open, memfd) instead",
        )
    return passed("sysv-memory", "none")


def huge_pages(look: Look) -> Check:
    found = look.of_kind(Kind.HUGE)
    if found:
        return warned(
            "huge-pages",
            f"{len(found)} mappings of reserved huge pages",
            "the target needs as many free (vm.nr_hugepages); transparent huge pages need nothing",
        )
    return passed("huge-pages", "none reserved")


def async_io(look: Look) -> Check:
    found = look.of_kind(Kind.AIO)
    if found:
        return warned(
            "async-io",
            f"{len(found)} kernel AIO contexts",
            "CRIU carries them when no request is under way at the freeze",
        )
    return passed("async-io", "none")
