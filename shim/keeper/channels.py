"""A channel: one pipe or pseudo-terminal between a keeper and its rank, and CRIU's name for it.

Invariants: the keeper itself opens the rank's end, in the rank's mount namespace, because CRIU cannot dump an inherited
descriptor. The keeper's ends are separate open file descriptions, so that O_NONBLOCK does not affect the rank. For
stdin the keeper also keeps a read end, to take back input that the rank has not read. That input would be lost
otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Any

from shim.keeper import terminal

PIPE = "pipe"
PTY = "pty"
CHUNK_BYTES = 1 << 16


class Channel:
    """`fds` are its descriptor numbers in the rank. A descriptor of -1 is closed or was never opened."""

    # No dataclass here and in ends.py: importing dataclasses takes a tenth of the time that `migrator run` may take.
    def __init__(self, name: str, kind: str, fds: tuple[int, ...], *, has_input: bool, has_output: bool) -> None:
        self.name = name
        self.kind = kind
        self.fds = fds
        self.has_input = has_input
        self.has_output = has_output
        self.key = ""  # pipe:[inode] or tty[rdev:dev], as CRIU's images name the rank's end
        self.rank_fd = -1
        self.read_fd = -1
        self.write_fd = -1
        self.unread_fd = -1
        self.was_shut = False  # the output has no reader any more
        self.size = (0, 0)

    @classmethod
    def pipe_to_rank(cls, name: str, fds: tuple[int, ...]) -> Channel:
        channel = cls(name, PIPE, fds, has_input=True, has_output=False)
        channel.rank_fd, channel.write_fd = _high_pipe()
        os.set_blocking(channel.write_fd, False)
        channel.unread_fd = os.open(f"/proc/self/fd/{channel.rank_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        channel.key = f"pipe:[{os.fstat(channel.rank_fd).st_ino}]"
        return channel

    @classmethod
    def pipe_from_rank(cls, name: str, fds: tuple[int, ...]) -> Channel:
        channel = cls(name, PIPE, fds, has_input=False, has_output=True)
        channel.read_fd, channel.rank_fd = _high_pipe()
        os.set_blocking(channel.read_fd, False)
        channel.key = f"pipe:[{os.fstat(channel.rank_fd).st_ino}]"
        return channel

    @classmethod
    def pseudo_terminal(cls, name: str, fds: tuple[int, ...], *, has_input: bool, has_output: bool) -> Channel:
        channel = cls(name, PTY, fds, has_input=has_input, has_output=has_output)
        master, slave = os.openpty()
        channel.read_fd, channel.rank_fd = _high(master), _high(slave)
        channel.write_fd = _high(os.dup(channel.read_fd))
        os.set_blocking(channel.read_fd, False)
        facts = os.fstat(channel.rank_fd)
        channel.key = f"tty[{facts.st_rdev:x}:{facts.st_dev:x}]"
        return channel

    def resize(self, rows: int, columns: int) -> None:
        self.size = (rows, columns)
        if self.kind == PTY and self.read_fd >= 0:
            terminal.set_window_size(self.read_fd, rows, columns)

    def give_rank_end(self) -> None:
        """Closes our descriptor of the rank's end once the rank has its own, so that the pipe can reach EOF."""
        self._close("rank_fd")

    def read(self) -> bytes | None:
        """Returns what the rank has written: b"" if there is nothing now, None if nothing can follow."""
        try:
            return os.read(self.read_fd, CHUNK_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:  # EIO: no process has the pseudo-terminal open
            return None

    def write(self, data: bytes) -> int:
        """Gives the rank as much input as fits. A terminal that no process has open discards it."""
        try:
            if self.write_fd < 0:  # unread input was taken back after EOF, and is written again
                self.write_fd = os.open(f"/proc/self/fd/{self.unread_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return os.write(self.write_fd, data[:CHUNK_BYTES])
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def end_input(self) -> None:
        """Makes the rank read EOF after everything that is in the pipe."""
        if self.kind == PIPE:
            self._close("write_fd")

    def take_back_input(self) -> bytes:
        """Removes and returns what was written but not read. The rank must be frozen."""
        if self.kind == PTY:
            return terminal.unread_input(self.read_fd) if self.read_fd >= 0 else b""
        found = bytearray()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.unread_fd, CHUNK_BYTES):
                found += data
        return bytes(found)

    def shut(self) -> None:
        """Closes an output that has no reader any more: the rank gets EPIPE, as it would without a keeper."""
        self.was_shut = True
        if self.kind == PIPE:
            self._close("read_fd")

    def close(self) -> None:
        for name in ("rank_fd", "read_fd", "write_fd", "unread_fd"):
            self._close(name)

    def _close(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            setattr(self, name, -1)
            os.close(fd)

    def describe(self) -> dict[str, Any]:
        """Returns the layout, without the data: what preflight, CRIU and the next keeper need."""
        found: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "fds": list(self.fds),
            "in": self.has_input,
            "out": self.has_output,
            "key": self.key,
            "shut": self.was_shut,
        }
        if self.kind == PTY:
            modes = terminal.modes_to_json(self.read_fd) if self.read_fd >= 0 else None
            found |= {"size": list(self.size), "modes": modes}
        return found

    @classmethod
    def again(cls, described: dict[str, Any], user_id: int, group_id: int) -> Channel:
        """Recreates on this node a channel that a keeper on another node described. The rank's user owns it."""
        name, fds = str(described["name"]), tuple(int(fd) for fd in described["fds"])
        if described["kind"] == PTY:
            channel = cls.pseudo_terminal(name, fds, has_input=bool(described["in"]), has_output=bool(described["out"]))
            terminal.modes_from_json(channel.rank_fd, described.get("modes"))
            channel.resize(*(int(value) for value in described.get("size", (0, 0))))
        elif described["in"]:
            channel = cls.pipe_to_rank(name, fds)
        else:
            channel = cls.pipe_from_rank(name, fds)
        os.fchown(channel.rank_fd, user_id, group_id)  # a rank may open /dev/stdout again
        if described.get("shut"):
            channel.shut()
        return channel


def _high(fd: int) -> int:
    """Moves a descriptor to a number above 0, 1, 2 and those that criu inherits by number."""
    high: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(fd)
    return high


def _high_pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    return _high(reading), _high(writing)
