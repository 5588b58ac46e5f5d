"""Restarts a system call in which a thread was when the rank was stopped, in the image of that thread.

If a call was interrupted by a stop, and by nothing else, the kernel continues it when the process continues. Criu keeps that
for most calls, by setting the thread back to before the call. Two kinds it restores as interrupted (EINTR), which a process
that is only stopped never sees, or rarely: calls that the kernel continues with `restart_syscall`, whose state is inside the
kernel (sleep, poll, futex with a time limit), and calls that are interrupted by a stop even so (epoll_wait, sockets with a
time limit; see signal(7)). All of them have had no effect, so they can be called again with the same arguments. A time
limit then begins anew, except where the kernel has written the time left over the argument, as for sleep(3).

Only x86-64 needs this, and there it is possible: beside the result the image has the number of the call, and criu has left
the other registers. On arm64 the kernel itself has set the thread back where a call can be continued, and for the others the
first argument is lost.

A thread that is in a signal handler, or has left one, has no number of a call: its EINTR stays.
"""

from __future__ import annotations

from typing import Any

_MASK = (1 << 64) - 1
_EINTR = -4 & _MASK
_X86_64 = 1  # CoreEntry.march
_NATIVE = 1  # of a process of 64 bits, or unset
_INSTRUCTION_BYTES = 2

#: Calls that have had no effect if they were interrupted. close(2), for instance, has closed the descriptor even so.
CALLS = {
    0: "read",
    1: "write",
    7: "poll",
    19: "readv",
    20: "writev",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    128: "rt_sigtimedwait",
    202: "futex",
    208: "io_getevents",
    230: "clock_nanosleep",
    232: "epoll_wait",
    281: "epoll_pwait",
    288: "accept4",
    299: "recvmmsg",
    307: "sendmmsg",
    441: "epoll_pwait2",
}


def restart_call(core: Any) -> bool:
    """`core` is criu's CoreEntry of a thread. Returns whether it was changed."""
    if core.mtype != _X86_64 or not core.HasField("thread_info"):
        return False
    registers = core.thread_info.gpregs
    if registers.HasField("mode") and registers.mode != _NATIVE:
        return False
    if registers.ax != _EINTR or registers.orig_ax not in CALLS or registers.ip < _INSTRUCTION_BYTES:
        return False
    registers.ax = registers.orig_ax
    registers.ip -= _INSTRUCTION_BYTES
    return True
