"""A child's end of the line to its daemon: a socket in the place of stdin, a JSON object per message, descriptors beside it.

Invariant: a child ends with its daemon, whatever it is doing: it is killed by the kernel, and where the daemon died before
that was arranged, the line has ended.
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

from snapshotd.transport.device.records import Trouble

MESSAGE_BYTES = 16 << 10
_PR_SET_PDEATHSIG = 1
#: Memory leaving the GPU, and criu, come first: they are waited for longer.
_NICE = 10


class Ended(Exception):
    """The daemon has hung up."""


class Control:
    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # a Ctrl-C at the daemon's terminal is for the daemon to decide about
        self._line = socket.socket(fileno=os.dup(0))
        os.nice(_NICE)

    def fileno(self) -> int:
        return self._line.fileno()

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors, now ours. Ended."""
        blob, fds, _, _ = socket.recv_fds(self._line, MESSAGE_BYTES, 4)
        if not blob:
            raise Ended
        return json.loads(blob), fds

    def say(self, **message: Any) -> None:
        self._line.send(json.dumps(message).encode())

    def mention(self, **message: Any) -> None:
        """For what will be said again anyway: not now if the daemon is too busy to listen."""
        try:
            self._line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return


def serve(work: Callable[[Control, dict[str, Any], list[int]], None]) -> NoReturn:
    """A child's whole life: `work` with the daemon's first message; what it raises is said, or is its last words."""
    control = Control()
    try:
        work(control, *control.hear())
    except Ended:
        os._exit(0)
    except Trouble as trouble:
        control.say(error=trouble.message, code=trouble.code)
    with contextlib.suppress(Ended):
        while True:  # the daemon ends it
            control.hear()
    os._exit(0)
