"""Facts about this machine, read from the kernel.

Invariant: nothing here has side effects. What cannot change while the machine is up is read once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from pathlib import Path

from snapshotd import __version__
from snapshotd.proc import cpuinfo, meminfo

DAEMON_VERSION = __version__

_TMPFS_MAGIC = 0x01021994  # linux/magic.h
_RAMFS_MAGIC = 0x858458F6


@functools.cache
def boot_id() -> str:
    """Changes with every boot: a process that was recorded under another boot id no longer exists."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def kernel() -> str:
    return platform.release()


@functools.cache
def architecture() -> str:
    return platform.machine()


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """The features that every CPU of this node has, sorted."""
    return cpuinfo.features()


def memory_available_bytes() -> int:
    """What can be allocated without swapping."""
    return meminfo.available_bytes()


def boottime_s() -> float:
    """Seconds since boot, including time spent suspended. This clock never goes back; leases are measured with it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_ram_backed(path: Path) -> bool:
    """Whether files at `path` are stored in memory only. If it does not exist yet, its nearest existing parent counts."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    # int statfs(const char *path, struct statfs *buf); f_type is the first word. os.statvfs does not have it.
    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(place), buffer) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(place))
    return buffer[0] in (_TMPFS_MAGIC, _RAMFS_MAGIC)
