"""Starts guest keepers before the pause of the move that needs them: until it is given its orders, one only waits for them.

Starting an interpreter takes a tenth of a second. Nothing of a rank or a move is in a keeper that waits: it has no namespace,
no cgroup and no connection yet, and it ends by itself when this daemon ends or closes its input.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from snapshotd.api.errors import Internal
from snapshotd.criu import session
from snapshotd.runtime import programs
from snapshotd.runtime.programs import Program

#: Where this program is installed.
_PACKAGES = Path(__file__).resolve().parents[3]
#: One that got no orders ends at once.
_END_S = 5.0

_waiting: deque[WaitingKeeper] = deque()


@dataclass
class WaitingKeeper:
    """A guest keeper without orders. All methods block."""

    process: subprocess.Popen[bytes]
    program: Program  # criu, which it will start
    ours: socket.socket  # our end of criu's connection
    criu_fd: int  # the number of criu's end in the keeper

    def order(self, orders: bytes, limit_s: float) -> None:
        """Raises BrokenPipeError if it has ended, TimeoutError if it does not read them all within the limit."""
        ends_s, left = time.monotonic() + limit_s, memoryview(orders)
        with self._input as stdin, selectors.DefaultSelector() as selector:
            os.set_blocking(stdin.fileno(), False)
            selector.register(stdin, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, ends_s - time.monotonic())):
                    raise TimeoutError
                left = left[os.write(stdin.fileno(), left) :]

    def wait(self) -> int:
        """Waits for the process that was started, which ends as soon as the keeper itself is no longer its child."""
        return self.process.wait()

    def end(self) -> None:
        """For one that is not needed."""
        self.ours.close()
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin


def prepare(criu: str) -> None:
    """Starts one for the next restore, if none waits. Raises Internal if it cannot be started."""
    if not _waiting:
        _waiting.append(_start(criu))


def take(criu: str) -> WaitingKeeper:
    """One that waits, or a new one. Raises Internal if it cannot be started."""
    with contextlib.suppress(IndexError):
        while True:
            found = _waiting.popleft()
            if found.process.poll() is None and found.program is programs.opened(criu):
                return found
            found.end()
    return _start(criu)


def close() -> None:
    """Ends those that were not needed."""
    with contextlib.suppress(IndexError):
        while True:
            _waiting.popleft().end()


def _start(criu: str) -> WaitingKeeper:
    program = programs.opened(criu)
    ours, theirs = session.swrk_pair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shim.keeper.guest"],
                pass_fds=(theirs.fileno(), *program.fds),
                env=programs.environment(PYTHONPATH=str(_PACKAGES)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
            return WaitingKeeper(process, program, ours, theirs.fileno())
    except OSError as error:
        ours.close()
        raise Internal(f"the guest keeper cannot be started: {error.strerror}") from error
