"""The keeper's own stdin, stdout and stderr: their kinds, the rank's channels that match them, and I/O on them.

Invariant: the keeper never changes the launcher's open files (no O_NONBLOCK on a description that a shell shares), and
never blocks on them. It reopens the file where it can. Elsewhere it writes only as much as is certain to fit.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from shim.keeper import terminal
from shim.keeper.channels import Channel

NULL = "null"
TERMINAL = "terminal"
PIPE = "pipe"
SOCKET = "socket"
FILE = "file"

_SURE_BYTES = 4096  # PIPE_BUF: POLLOUT guarantees this much room


class End(NamedTuple):
    """One of the keeper's descriptors 0, 1, 2. `identity` tells whether two of them are the same open file."""

    fd: int
    kind: str
    identity: tuple[int, int, int]

    @classmethod
    def of(cls, fd: int) -> End:
        try:
            facts = os.fstat(fd)
        except OSError:
            return cls(fd, NULL, (0, 0, 0))  # closed: the rank gets /dev/null, which every program expects
        identity = (facts.st_dev, facts.st_ino, facts.st_rdev)
        if os.isatty(fd):
            return cls(fd, TERMINAL, identity)
        if stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3):
            return cls(fd, NULL, identity)
        if stat.S_ISFIFO(facts.st_mode):
            return cls(fd, PIPE, identity)
        return cls(fd, SOCKET if stat.S_ISSOCK(facts.st_mode) else FILE, identity)


def own_ends() -> list[End]:
    """Returns the ends 0, 1 and 2. Opens closed ones to /dev/null, so that no other file gets their numbers."""
    found = [End.of(fd) for fd in range(3)]
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open("/dev/null", os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
    return found


def channels_for(ends: list[End]) -> list[Channel]:
    """Returns the rank's channels: a terminal for a terminal, a pipe for all else, one channel for each open file."""
    stdin, stdout, stderr = ends
    channels: list[Channel] = []
    terminals: dict[tuple[int, int, int], list[int]] = {}
    for end in ends:
        if end.kind == TERMINAL:
            terminals.setdefault(end.identity, []).append(end.fd)
    for fds in terminals.values():
        channel = Channel.pseudo_terminal(str(fds[0]), tuple(fds), has_input=0 in fds, has_output=True)
        terminal.modes_from_json(channel.rank_fd, terminal.modes_to_json(fds[0]))
        if not (0 in fds and terminal.RealTerminal(0).wants_raw()):
            terminal.quiet_modes(channel.rank_fd)
        channel.resize(*terminal.window_size(fds[0]))
        channels.append(channel)
    if stdin.kind not in (NULL, TERMINAL):
        channels.append(Channel.pipe_to_rank("0", (0,)))
    outputs = [end for end in (stdout, stderr) if end.kind not in (NULL, TERMINAL)]
    if len(outputs) == 2 and outputs[0].identity == outputs[1].identity:
        channels.append(Channel.pipe_from_rank("1", (1, 2)))
    else:
        channels += [Channel.pipe_from_rank(str(end.fd), (end.fd,)) for end in outputs]
    return channels


def _opened_again(fd: int, flags: int) -> int:
    """Opens a new description of the same pipe or terminal; -1 if that is impossible (another user's, or a socket)."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1


class Sink:
    """The destination of a channel's output: the real stdout or stderr, or the terminal that echoes input."""

    def __init__(self, channel: Channel, ends: list[End]) -> None:
        self.fd = next((fd for fd in channel.fds if fd > 0), channel.fds[0])
        kind = ends[self.fd].kind
        again = _opened_again(self.fd, os.O_WRONLY) if kind in (PIPE, TERMINAL) else -1
        self._most_bytes = 1 << 20 if again >= 0 or kind == FILE else _SURE_BYTES
        self.fd = again if again >= 0 else self.fd
        self.is_broken = False

    def write(self, data: bytes) -> int:
        """Writes what fits and returns its size. Call it when writable. Sets `is_broken` if there is no reader."""
        try:
            return os.write(self.fd, data[: self._most_bytes])
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE, EIO of a terminal that hung up, ENOSPC: the rank's own write would have failed
            self.is_broken = True
            return 0


class Keyboard:
    """The real stdin."""

    def __init__(self, end: End) -> None:
        again = _opened_again(0, os.O_RDONLY) if end.kind in (PIPE, TERMINAL) else -1
        self.fd = max(again, 0)
        self.terminal = terminal.RealTerminal(0) if end.kind == TERMINAL else None
        self.is_open = end.kind != NULL

    def may_read(self) -> bool:
        return self.is_open and (self.terminal is None or self.terminal.in_foreground())

    def read(self) -> bytes:
        """Returns what is there now, b"" if nothing. Clears `is_open` at EOF."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError:  # the terminal hung up, or the keeper left its foreground since the check
            self.is_open = self.terminal is not None and not self.terminal.in_foreground()
            return b""
        self.is_open = bool(data)
        return data
