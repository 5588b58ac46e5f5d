"""What the two processes that copy between a GPU and stripes have in common (copier.py, filler.py)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from snapshotd.api.errors import SnapshotError
from snapshotd.holder.driver import DriverError
from snapshotd.holder.process import MESSAGE_BYTES
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.profiles import Profile

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 900


class Work(Protocol):
    def run(self) -> None: ...


def main(make: Callable[[socket.socket, dict[str, Any]], Work]) -> None:
    """Reads the settings from the daemon, and does the work that `make` makes of them. A failure is the last answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))
    enter(Profile.CUDA)
    line = socket.socket(fileno=os.dup(0))
    blob = line.recv(MESSAGE_BYTES)
    if not blob:
        return
    try:
        make(line, json.loads(blob)).run()
    except (OSError, DriverError, SnapshotError) as error:
        line.send(json.dumps({"error": str(error), "code": "gpu-failed"}).encode())
        line.recv(1)
