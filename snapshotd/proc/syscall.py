"""/proc/PID/task/TID/syscall: the system call that a thread is in."""

from __future__ import annotations

import platform

from snapshotd.proc.files import GONE, process_path, read_text

#: The numbers of clone, fork, vfork and clone3.
_NEW_PROCESS = {"x86_64": {56, 57, 58, 435}, "aarch64": {220, 435}}


def starts_a_process(pid: int, tid: int) -> bool:
    """Whether the thread is in clone(2) or the like. In posix_spawn(3) it waits there until the new process has executed its
    program, and blocks all signals meanwhile."""
    try:
        number, _, _ = read_text(process_path(pid, "syscall", tid)).partition(" ")
    except (*GONE, PermissionError):
        return False
    return number.isdecimal() and int(number) in _NEW_PROCESS.get(platform.machine(), ())
