"""Facts of this machine, read from the kernel. The cgroup2 mount point is in snapshotd/proc/cgroup.py.

Invariant: nothing here changes anything, and what cannot change while the machine is up is read once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from pathlib import Path

from snapshotd import __version__

DAEMON_VERSION = __version__

_TMPFS_MAGIC = 0x01021994  # linux/magic.h
_RAMFS_MAGIC = 0x858458F6


@functools.cache
def boot_id() -> str:
    """Another one after every boot: a process recorded under another boot id no longer exists."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def kernel() -> str:
    return platform.release()


@functools.cache
def architecture() -> str:
    return platform.machine()


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """What the first CPU can do, sorted: `flags` on x86, `Features` on arm."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


def memory_available_bytes() -> int:
    """MemAvailable: what can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def boottime_s() -> float:
    """Seconds since boot, suspended ones included. Leases are differences of this clock; it never goes back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_ram_backed(path: Path) -> bool:
    """Whether files made at `path` live in memory alone. Where it does not exist yet, its nearest parent answers."""
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
