"""One helper process as the daemon sees it: sends requests, detects its death, kills it when it hangs.

Invariant: every request ends with an answer, with Lost if the process died or was killed meanwhile, or with
TimeoutError, after which the process is killed. A cancelled request waits for its answer like any other: the driver
continues anyway, and nothing else may act on the rank meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

#: An inventory of many GPUs with many processes is one line.
_LINE_BYTES = 8 << 20
#: A killed process is normally gone in a millisecond. One that hangs in the kernel is reaped later.
_REAP_S = 2.0

_PACKAGES = Path(__file__).resolve().parents[2]


class Lost(Exception):
    """The helper exited before it answered. `by_us`: it was killed because another request hung."""

    def __init__(self, reason: str, *, by_us: bool) -> None:
        super().__init__(reason)
        self.by_us = by_us


class HelperProcess:
    """One helper process. Not reused after it is lost."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lost: Lost | None = None
        self._retired = False
        self._initialised: asyncio.Task[dict[str, Any]] | None = None
        self._reader = asyncio.create_task(self._read(), name="cuda-helper")

    @classmethod
    async def start(cls, library_dir: str) -> HelperProcess:
        """Starts a helper; Lost if that fails. The first request loads the libraries, within its time limit."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "snapshotd.cuda.helper"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,
                cwd="/",
                env=_environment(library_dir),
            )
        except OSError as error:
            raise Lost(f"the GPU helper cannot be started: {error.strerror}", by_us=False) from error
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self._lost is None and not self._retired

    @property
    def ended(self) -> bool:
        """Whether the process has exited and was reaped."""
        return self._reader.done()

    async def ask(self, call: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """The answer. Raises Lost, or TimeoutError with the helper killed if there is none after `limit_s`."""
        if not self.alive:
            raise Lost(str(self._lost or "the GPU helper was retired"), by_us=self._lost is None or self._lost.by_us)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._pending[number] = future
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "call": call, **arguments}).encode() + b"\n")
        try:
            await asyncio.wait({future}, timeout=limit_s)
        except asyncio.CancelledError:
            await asyncio.wait({future}, timeout=deadline - loop.time())
            raise
        finally:
            del self._pending[number]
            if not future.done():
                future.cancel()
                self.kill(f"{call} did not answer within {limit_s:.3g} s")
            else:
                future.exception()  # retrieved: a cancelled request must not log "never retrieved"
            self._end_when_retired()
        if future.cancelled():
            raise TimeoutError(f"the GPU helper did not answer within {limit_s:.3g} s")
        return future.result()

    async def initialise(self, limit_s: float) -> None:
        """Initialises libcuda, once for all callers. Raises as `ask` does; a missing driver is not an error here."""
        if self._initialised is None:
            self._initialised = asyncio.create_task(self.ask("init", limit_s), name="cuda-init")
        await asyncio.wait({self._initialised})
        self._initialised.result()

    def kill(self, why: str, *, by_us: bool = True) -> None:
        """Kills the process. Pending requests get Lost now, not when the process is gone: one that hangs in the kernel
        stays."""
        log.warning("killing the GPU helper (pid %d): %s", self.pid, why)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._lose(Lost(f"the GPU helper was killed: {why}", by_us=by_us))

    def retire(self) -> None:
        """Accepts no more requests; the process exits when the last pending one is answered."""
        self._retired = True
        self._end_when_retired()

    def _end_when_retired(self) -> None:
        if self._retired and not self._pending and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._pending:
            self.kill("the daemon is exiting")
        if self._initialised is not None:
            await asyncio.wait({self._initialised})
        done, _ = await asyncio.wait({self._reader}, timeout=_REAP_S)
        if not done:
            self.kill("it did not exit with its stdin")
            done, _ = await asyncio.wait({self._reader}, timeout=_REAP_S)
        if not done:
            self._reader.cancel()

    def _lose(self, lost: Lost) -> None:
        self._lost = self._lost or lost
        for future in self._pending.values():
            if not future.done():
                future.set_exception(lost)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                future = self._pending.get(answer.pop("id"))
                if future is not None and not future.done():
                    future.set_result(answer)
        except ValueError as error:  # not JSON, or a line without end
            self.kill(f"it sent an invalid answer: {error}", by_us=False)
        status = await self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if self._pending and self._lost is None:
            log.warning("the GPU helper (pid %d) exited with %s", self.pid, how)
        self._lose(Lost(f"the GPU helper exited with {how}", by_us=False))


def _environment(library_dir: str) -> dict[str, str]:
    """The daemon's environment without variables that change what libcuda sees (CUDA_VISIBLE_DEVICES, injected profilers)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_") and key != "LD_PRELOAD"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGES), kept.get("PYTHONPATH")]))
    if library_dir:
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [library_dir, kept.get("LD_LIBRARY_PATH")]))
    return kept
