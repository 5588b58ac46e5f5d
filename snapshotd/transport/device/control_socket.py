"""A child's control socket to its daemon: it replaces stdin and carries one JSON object per message, with descriptors.

Invariant: a child dies with its daemon, whatever it is doing. The kernel kills it; if the daemon died before that was
arranged, the socket is at end of file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from snapshotd.sandbox.enter import enter, library_paths
from snapshotd.sandbox.profiles import Profile
from snapshotd.transport.device.records import StripeError

MESSAGE_BYTES = 16 << 10
_PR_SET_PDEATHSIG = 1
#: If memory runs out after all, the kernel kills these processes first: the move is undone, and no job or daemon is lost.
_OOM_SCORE = 900
#: Copies off the GPU and criu take longer, and so have priority.
_NICE = 10


class Ended(Exception):
    """The daemon has closed the socket."""


class Control:
    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
        self._line = socket.socket(fileno=os.dup(0))
        os.nice(_NICE)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(_OOM_SCORE))

    def fileno(self) -> int:
        return self._line.fileno()

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors, which this process now owns. Ended."""
        blob, fds, _, _ = socket.recv_fds(self._line, MESSAGE_BYTES, 4)
        if not blob:
            raise Ended
        return json.loads(blob), fds

    def say(self, **message: Any) -> None:
        self._line.send(json.dumps(message).encode())

    def mention(self, **message: Any) -> None:
        """For progress, which is sent again anyway: dropped if the daemon is too busy to read."""
        try:
            self._line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return


def restrict(path: str) -> None:
    """From now on this process has the rights of root's files alone, and opens nothing but that file and those beside it."""
    enter(Profile.STRIPE, read=library_paths(), write=[os.path.dirname(path)])


def serve(work: Callable[[Control, dict[str, Any], list[int]], None]) -> NoReturn:
    """Runs `work` with the daemon's first message. A StripeError is reported; any other exception ends up in the output."""
    control = Control()
    try:
        work(control, *control.hear())
    except Ended:
        os._exit(0)
    except StripeError as error:
        control.say(error=error.message, code=error.code)
    with contextlib.suppress(Ended):
        while True:  # until the daemon kills this process
            control.hear()
    os._exit(0)
