"""Fresh pid and mount namespaces for a guest keeper and the rank that is restored under it.

Invariant: the pid namespace is empty but for the keeper (pid 1), so no pid of the rank's tree can be taken; /proc in it
is its own. Mounts made by the node later still appear inside (slave), none made inside appears outside.
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

#: With so many pids the keeper's own helpers (criu) can be numbered far from where ranks usually are.
_MANY_PIDS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def fork_into_fresh_namespaces() -> bool:
    """True in the new pid 1; False in the caller, whose next children would all be in that namespace: it should end."""
    _check(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS), "unshare")
    if os.fork() != 0:
        return False
    _check(_libc.mount(None, b"/", None, _MS_SLAVE | _MS_REC, None), "mount / as slave")
    _check(_libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "mount /proc")
    return True


def number_next_process_high() -> None:
    """criu must not sit on a pid that the rank had in a container, where pids are small."""
    with contextlib.suppress(OSError, ValueError):
        pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
        if pid_max >= _MANY_PIDS:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid_max - 1000))
