"""Forks the rank, and lets it exec when the daemon has put it into its cgroup.

Invariants: the rank leads its session. Its descriptors are exactly 0, 1 and 2, opened by the keeper. It inherits
directory, umask, limits, priority, user and groups from the launcher, because nothing changes them. If the keeper
ends for any reason, the kernel kills the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from shim.keeper import library, signals
from shim.keeper.channels import PTY, Channel

NOT_FOUND = 127
NOT_EXECUTABLE = 126

_PR_SET_PDEATHSIG = 1
_NO_FD_ABOVE = (1 << 31) - 1
_libc = ctypes.CDLL(None, use_errno=True)


def rank_environment(given: Mapping[str, str], preload: Path | None) -> dict[str, str]:
    """Returns the launcher's environment with the library `preload` in front of LD_PRELOAD. There is never more than one of
    our libraries, not even if a rank starts a rank."""
    environment = dict(given)
    if preload is not None:
        ours = [str(preload.with_name(name)) for name in library.NAMES]
        already = environment.get("LD_PRELOAD", "")
        words = already.replace(" ", ":").split(":")
        if any(other in words for other in ours if other != str(preload)):
            already = ":".join(word for word in words if word not in ours or word == str(preload))
        if str(preload) not in words:
            environment["LD_PRELOAD"] = f"{preload}:{already}" if already else str(preload)
    return environment


class Child:
    """A forked rank that waits for permission to exec. Its `pid` does not change."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        channels: Sequence[Channel],
        ignored: frozenset[int],
        mask: set[signal.Signals],
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        keeper_pid = os.getpid()
        wait_fd, self._go_fd = os.pipe2(os.O_CLOEXEC)
        # Between fork and the reset of dispositions a signal must not run the keeper's handlers in the child.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_rank(argv, environment, channels, wait_fd, keeper_pid, ignored, mask)
            except OSError as error:
                os.write(2, f"migrator run: cannot prepare the rank: {error}\n".encode())
            finally:
                os._exit(NOT_EXECUTABLE)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(wait_fd)

    def go(self) -> None:
        """Lets the child exec. A child that never may ends when the keeper ends."""
        if self._go_fd >= 0:
            with contextlib.suppress(BrokenPipeError):  # it has ended already; the wait status says why
                os.write(self._go_fd, b"!")
            os.close(self._go_fd)
            self._go_fd = -1


def _become_rank(
    argv: Sequence[str],
    environment: Mapping[str, str],
    channels: Sequence[Channel],
    wait_fd: int,
    keeper_pid: int,
    ignored: frozenset[int],
    mask: set[signal.Signals],
) -> NoReturn:
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper_pid:
        os._exit(NOT_EXECUTABLE)  # the keeper had ended before the parent-death signal was set
    wait_fd = fcntl.fcntl(wait_fd, fcntl.F_DUPFD_CLOEXEC, 64)
    ends = {fd: channel.rank_fd for channel in channels for fd in channel.fds}
    if any(fd not in ends for fd in range(3)):
        null_fd = fcntl.fcntl(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), fcntl.F_DUPFD_CLOEXEC, 64)
        ends |= {fd: null_fd for fd in range(3) if fd not in ends}
    for fd, end in ends.items():
        os.dup2(end, fd, inheritable=True)
    os.closerange(3, wait_fd)
    os.closerange(wait_fd + 1, _NO_FD_ABOVE)
    terminal_fd = next((channel.fds[0] for channel in channels if channel.kind == PTY), None)
    if terminal_fd is not None:
        fcntl.ioctl(terminal_fd, termios.TIOCSCTTY, 0)
    signals.as_launched(ignored, mask)
    if os.read(wait_fd, 1) != b"!":
        os._exit(NOT_EXECUTABLE)
    try:
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        os.write(2, f"migrator run: cannot start {argv[0]!r}: {os.strerror(error.errno or 0)}\n".encode())
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)
