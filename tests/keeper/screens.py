"""A terminal with a simulated user: what appears on it and what is typed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import termios
from asyncio.subprocess import Process
from typing import Any

from tests.keeper.nodes import Node


class Screen:
    def __init__(self, rows: int = 31, columns: int = 97) -> None:
        self._master, self.slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.text = b""
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def launch(self, node: Node, *argv: str, **streams: Any) -> Process:
        """`migrator run` as a shell on this terminal would start it: in the foreground."""
        slave = self.slave

        def take_terminal() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        given = {"stdin": slave, "stdout": slave, "stderr": slave, **streams}
        return await node.launch(*argv, start_new_session=True, preexec_fn=take_terminal, pass_fds=[slave], **given)

    async def shows(self, text: bytes) -> None:
        """Waits until `text` has appeared since the last call, and discards everything up to it."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._master, readable.set)
        try:
            async with asyncio.timeout(20):
                while text not in self.text:
                    await readable.wait()
                    readable.clear()
                    with contextlib.suppress(BlockingIOError):
                        self.text += os.read(self._master, 4096)
        except TimeoutError:
            raise AssertionError(f"the screen never shows {text!r}, only {self.text!r}") from None
        finally:
            loop.remove_reader(self._master)
        self.text = self.text.partition(text)[2]

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)
