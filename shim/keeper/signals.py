"""Decides which signals a keeper forwards, and to which processes.

A rank leads its own session, so the terminal's signals do not reach it directly. Signals that a terminal would send to
the whole foreground group (INT, QUIT, HUP) go to the rank's process group, all others to the rank alone. TSTP becomes
STOP, because the kernel discards TSTP in an orphaned process group such as the rank's. Signals that the launcher
ignored (nohup's HUP) stay ignored in keeper and rank.
"""

from __future__ import annotations

import contextlib
import os
import signal

#: Not forwarded: they cannot be caught, concern the keeper alone, or are caused by a defect in the keeper itself.
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
#: Python ignores these at startup, so it is not known whether the launcher did.
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
    """In the child, before exec: restores every disposition and the mask that the launcher had set."""
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
    """Sends a signal to a rank that is our child and not reaped, so that its pid cannot have been reused."""
    sent = signal.SIGSTOP if number == signal.SIGTSTP else number
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number in _TO_GROUP:
            os.killpg(pid, sent)
        else:
            os.kill(pid, sent)


def die_of(number: int) -> None:
    """Ends this process by the signal that ended the rank; returns only if that signal does not end a process."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
