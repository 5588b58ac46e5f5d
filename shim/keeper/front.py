"""The standard streams and the terminal that the launcher gave the keeper.

Invariant: a byte that the rank wrote leaves its `Tail` when it has been written to the launcher's file, or when that
file cannot be written any more. Then the rank's channel is shut, so that the rank gets the error that its own file
would have given.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial

from shim.keeper import terminal
from shim.keeper.channels import PTY
from shim.keeper.ends import Keyboard, Sink, channels_for, own_ends
from shim.keeper.loop import Wish
from shim.keeper.tail import Tail


class Front:
    """`channels` are the rank's. `shut` is called with the name of a channel that has lost its reader."""

    def __init__(self, shut: Callable[[str], None]) -> None:
        ends = own_ends()
        self.channels = channels_for(ends)
        self.keyboard = Keyboard(ends[0])
        self._shut = shut
        self._sinks = {channel.name: Sink(channel, ends) for channel in self.channels if channel.has_output}
        self._terminal_fd = next((channel.fds[0] for channel in self.channels if channel.kind == PTY), -1)

    # ---- output

    def wishes(self, tails: dict[str, Tail]) -> Iterable[Wish]:
        for name, tail in tails.items():
            if len(tail):
                yield Wish(self._sinks[name].fd, on_writable=partial(self._deliver, name, tail))

    def discard_unwanted(self, tails: dict[str, Tail]) -> None:
        for name, tail in tails.items():
            if self._sinks[name].is_broken:
                tail.release(tail.end)

    def _deliver(self, name: str, tail: Tail) -> None:
        sink = self._sinks[name]
        tail.release(tail.base + sink.write(tail.read(tail.base, 1 << 16)))
        if sink.is_broken:
            self._shut(name)

    # ---- the terminal

    @property
    def has_terminal(self) -> bool:
        return self._terminal_fd >= 0

    def window_size(self) -> tuple[int, int]:
        return terminal.window_size(self._terminal_fd)

    def enter_terminal(self) -> None:
        if self.keyboard.terminal is not None and self.keyboard.is_open:
            self.keyboard.terminal.make_raw()

    def leave_terminal(self) -> None:
        if self.keyboard.terminal is not None:
            self.keyboard.terminal.restore()

    def stop_with_shell(self) -> None:
        """Stops the keeper on Ctrl-Z, because the shell waits for that. Without a terminal there is no such shell."""
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return
        self.leave_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
