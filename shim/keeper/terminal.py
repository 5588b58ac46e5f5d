"""The keeper's real terminal, and the pseudo-terminals that ranks get instead.

Invariant: `RealTerminal.restore` restores the terminal's original modes. A real terminal is read only while it is the
keeper's controlling terminal and the keeper is in the foreground: ranks of a background job, or several ranks at one
terminal, must not take input from the user's shell.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import struct
import termios
import time
import tty
from typing import Any

TIOCGPTPEER = 0x5441  # asm-generic/ioctls.h; x86-64 and arm64 alike

_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
_ECHO_SETTLES_S = 0.02


def window_size(fd: int) -> tuple[int, int]:
    """Returns (rows, columns) of a terminal, (0, 0) if it has no size."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        return 0, 0
    return rows, columns


def set_window_size(fd: int, rows: int, columns: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0))


def open_peer(master_fd: int) -> int:
    """Opens the rank's end of a pseudo-terminal, without a path in the file system."""
    return fcntl.ioctl(master_fd, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)


def modes_to_json(fd: int) -> list[Any] | None:
    try:
        modes = termios.tcgetattr(fd)
    except termios.error:
        return None
    return [*modes[:_CC], [sign if isinstance(sign, int) else sign[0] for sign in modes[_CC]]]


def modes_from_json(fd: int, modes: object) -> None:
    """Sets a terminal's modes from the output of `modes_to_json`; anything else is ignored."""
    match modes:
        case [int(), int(), int(), int(), int(), int(), list(signs)] if all(
            isinstance(sign, int) and 0 <= sign < 256 for sign in signs
        ):
            with contextlib.suppress(termios.error, TypeError):
                attributes: list[Any] = [*modes[:_CC], [bytes([sign]) for sign in signs]]
                termios.tcsetattr(fd, termios.TCSANOW, attributes)


def unread_input(master_fd: int) -> bytes:
    """Takes back typed input that the (frozen) rank has not read, including an unfinished line. Raises OSError."""
    peer = open_peer(master_fd)
    try:
        modes = termios.tcgetattr(peer)
        raw = [*modes[:_CC], list(modes[_CC])]
        raw[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
        raw[_CC][termios.VMIN], raw[_CC][termios.VTIME] = 1, 0
        termios.tcsetattr(peer, termios.TCSANOW, raw)
        found = bytearray()
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(peer, 4096):
                found += data
        termios.tcsetattr(peer, termios.TCSANOW, modes)
        return bytes(found)
    except termios.error as error:
        raise OSError(*error.args) from error
    finally:
        os.close(peer)


def put_back_input(master_fd: int, data: bytes) -> int:
    """Inserts `data` as input again, without echo, because the user has seen it. Returns how much fitted."""
    try:
        peer = open_peer(master_fd)
    except OSError:
        return 0
    try:
        modes = termios.tcgetattr(peer)
        silent = [*modes[:_CC], list(modes[_CC])]
        silent[_LFLAG] &= ~termios.ECHO
        termios.tcsetattr(peer, termios.TCSANOW, silent)
        written = os.write(master_fd, data)
        time.sleep(_ECHO_SETTLES_S)  # the line discipline works asynchronously, and does not signal completion
        termios.tcsetattr(peer, termios.TCSANOW, modes)
        return written
    except (OSError, termios.error):
        return 0
    finally:
        os.close(peer)


class RealTerminal:
    """The terminal on the keeper's own stdin, if there is one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._modes: list[Any] | None = None

    def in_foreground(self) -> bool:
        """Whether this is our controlling terminal and we are in its foreground."""
        group = array.array("i", [0])
        try:
            fcntl.ioctl(self.fd, termios.TIOCGPGRP, group)
        except OSError:
            return False
        return group[0] == os.getpgrp()

    def wants_raw(self) -> bool:
        """Whether to set raw mode, so that every key, also Ctrl-C, reaches the rank's pseudo-terminal.

        If a launcher is in the same process group the terminal keeps its modes: Ctrl-C is for the launcher too.
        """
        return self.in_foreground() and os.getpgrp() == os.getpid()

    def make_raw(self) -> None:
        if self._modes is None and self.wants_raw():
            with contextlib.suppress(termios.error):  # the terminal has just hung up
                modes = termios.tcgetattr(self.fd)
                tty.setraw(self.fd, termios.TCSADRAIN)
                self._modes = modes

    def restore(self) -> None:
        modes, self._modes = self._modes, None
        if modes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self.fd, termios.TCSADRAIN, modes)


def quiet_modes(fd: int) -> None:
    """Modes for a rank's pseudo-terminal whose real terminal keeps its modes: that one already echoes and adds CRs."""
    modes = termios.tcgetattr(fd)
    modes[_OFLAG] &= ~termios.OPOST
    modes[_LFLAG] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, modes)
