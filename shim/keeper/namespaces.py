"""Creates pid and mount namespaces for a guest keeper and the rank that is restored under it.

Invariant: the pid namespace contains only the keeper (pid 1), so no pid of the rank's tree is in use; its /proc shows
only that namespace. Later mounts of the node appear inside (slave); mounts made inside do not appear outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REC = 0x4000
_MS_SLAVE = 1 << 19

#: This leaves room for the keeper's helpers (criu) to get pids far above those that ranks usually have.
_MANY_PIDS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def fork_into_fresh_namespaces() -> bool:
    """Returns True in the new pid 1 and False in the caller, which should exit: all its children would be in there."""
    _check(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS), "unshare")
    if os.fork() != 0:
        return False
    _check(_libc.mount(None, b"/", None, _MS_SLAVE | _MS_REC, None), "mount / as slave")
    _check(_libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "mount /proc")
    return True


def number_next_process_high() -> None:
    """Gives criu a high pid, because the rank may need the low ones that it had in a container."""
    with contextlib.suppress(OSError, ValueError):
        pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
        if pid_max >= _MANY_PIDS:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid_max - 1000))
