"""A terminal, as its user sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from typing import Any

from integration.harness import until


class Screen:
    def __init__(self, rows: int, columns: int) -> None:
        self._master, self.slave = pty.openpty()
        self.seen = bytearray()
        self.resize(rows, columns)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self.seen += data
        except OSError:
            return

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def shows(self, text: str) -> None:
        until(f"{text!r} on the terminal, which shows {self.seen[-300:]!r}", lambda: text.encode() in self.seen)

    def take(self) -> None:
        """In the child: this is its controlling terminal."""
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def of_a_job(self) -> dict[str, Any]:
        """The arguments with which a job gets this terminal."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        return {**streams, "start_new_session": True, "preexec_fn": self.take, "pass_fds": [self.slave]}

    def steps(self) -> list[int]:
        return [int(number) for number in re.findall(rb"step (\d+)\r\n", self.seen)]
