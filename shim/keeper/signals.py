"""Which signals a keeper passes on, and to whom.

A rank leads its own session, so the terminal's signals do not reach it by themselves. What a terminal would send to
the whole foreground group (INT, QUIT, HUP) goes to the rank's process group, everything else to the rank alone. TSTP
becomes STOP: the rank's process group is orphaned, where the kernel discards TSTP. Signals that the launcher had ignored
(nohup's HUP) stay ignored, for keeper and rank.
"""

from __future__ import annotations

import contextlib
import os
import signal

#: Not forwarded: not catchable; the keeper's own business; or the trace of a defect in the keeper itself.
_KEPT = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
}
_TO_GROUP = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP}
#: Python ignores these for itself at its start; whether the launcher had done so is not known any more.
_PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}


def ignored_by_launcher() -> frozenset[int]:
    return frozenset(
        number
        for number in signal.valid_signals()
        if number not in _PYTHONS_OWN and signal.getsignal(number) == signal.SIG_IGN
    )


def to_forward(ignored: frozenset[int]) -> list[int]:
    return sorted(number for number in signal.valid_signals() if number not in _KEPT and number not in ignored)


def as_launched(ignored: frozenset[int], mask: set[signal.Signals]) -> None:
    """In the child, before exec: every disposition and the mask as the launcher gave them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        wanted = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if signal.getsignal(number) != wanted:
            with contextlib.suppress(OSError):  # glibc's own real-time signals
                signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def deliver(pid: int, number: int) -> None:
    """To a rank that is our child and not reaped, so that its pid cannot be anybody else's."""
    sent = signal.SIGSTOP if number == signal.SIGTSTP else number
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number in _TO_GROUP:
            os.killpg(pid, sent)
        else:
            os.kill(pid, sent)


def die_of(number: int) -> None:
    """Ends this process by the signal that ended the rank; returns only for a signal that does not end anything."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
