"""The process that uses the CUDA driver and NVML, so that the daemon does not: `python -m snapshotd.cuda.helper`.

Reads requests from stdin, one JSON object per line, and answers on stdout in the order they finish:

    {"id": 7, "call": "lock", "pid": 4711, "start_ticks": 99, "timeout_ms": 5000}
    {"id": 7, "error": "CUDA_ERROR_NOT_READY"}

An answer has "error" (the driver's name for it, "" on success), or "gone" (the pid is not that process any more), or
"unusable" (why there is no driver, with "no_gpu": whether because there is no GPU), and the result.

Every call has its own thread, so one that hangs delays no other. This process has no time limits; the daemon kills it.
It ends with its stdin and with the daemon. It must never outlive the daemon: it would go on changing ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from snapshotd.cuda.bindings import Driver, DriverError, Unusable
from snapshotd.proc import stat
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.profiles import Profile

_PR_SET_PDEATHSIG = 1
Answer = dict[str, Any]


class Calls:
    """All calls. The libraries are loaded by the first call that needs them."""

    def __init__(self) -> None:
        self._once = threading.Lock()
        self._driver: Driver | None = None
        self.by_name: dict[str, Callable[[Answer], Answer]] = {
            "inventory": self._inventory,
            "health": self._health,
            "init": self._init,
            "state": self._state,
            "lock": self._lock,
            "checkpoint": self._checkpoint,
            "restore": self._restore,
            "unlock": self._unlock,
            "restore_thread": self._restore_thread,
        }

    def _cuda(self) -> Driver:
        with self._once:
            if self._driver is None:
                self._driver = Driver()
            return self._driver

    def _inventory(self, request: Answer) -> Answer:
        from snapshotd.cuda import nvml

        return nvml.inventory()

    def _health(self, request: Answer) -> Answer:
        from snapshotd.cuda import nvml_health

        return nvml_health.readings()

    def _init(self, request: Answer) -> Answer:
        return {"version": self._cuda().version}

    def _state(self, request: Answer) -> Answer:
        return {"state": self._cuda().state(_verified(request))}

    def _lock(self, request: Answer) -> Answer:
        self._cuda().lock(_verified(request), int(request["timeout_ms"]))
        return {}

    def _checkpoint(self, request: Answer) -> Answer:
        self._cuda().checkpoint(_verified(request))
        return {}

    def _restore(self, request: Answer) -> Answer:
        pairs = [(str(old), str(new)) for old, new in request["pairs"]]
        self._cuda().restore(_verified(request), pairs)
        return {}

    def _unlock(self, request: Answer) -> Answer:
        self._cuda().unlock(_verified(request))
        return {}

    def _restore_thread(self, request: Answer) -> Answer:
        return {"thread": self._cuda().restore_thread(_verified(request))}


def _verified(request: Answer) -> int:
    """The pid, verified as late as possible. Raises ProcessLookupError if it is not that process (any more).

    Not tree.Process.alive(): that module imports gRPC, which would be most of this process's memory."""
    pid = int(request["pid"])
    now = stat.read(pid)
    if now.start_ticks != request["start_ticks"] or now.dead:
        raise ProcessLookupError(pid)
    return pid


def answer(calls: Calls, request: Answer) -> Answer:
    """The answer to one request. Every failure is an answer too: a request without one would only time out."""
    call = calls.by_name.get(str(request.get("call")))
    if call is None:
        return {"error": f"unknown call {request.get('call')!r}"}
    try:
        return {"error": "", **call(request)}
    except DriverError as error:
        return {"error": error.name}
    except ProcessLookupError:
        return {"gone": True}
    except Unusable as error:
        return {"unusable": str(error), "no_gpu": error.no_gpu}
    except Exception as error:  # noqa: BLE001 - see above
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # if the daemon died before this, stdin is at end of file
    enter(Profile.CUDA)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of a library must not be taken for an answer
    calls, writing = Calls(), threading.Lock()

    def serve(request: Answer) -> None:
        line = json.dumps({"id": request.get("id"), **answer(calls, request)})
        with writing:
            out.write(line + "\n")
            out.flush()

    for line in sys.stdin:
        threading.Thread(target=serve, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # at once: a thread may hang in the driver for ever


if __name__ == "__main__":
    main()
