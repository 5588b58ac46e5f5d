"""The daemon's end of one child: starts it, hears it, hands it descriptors, ends it.

Invariant: `close` returns only when the process is gone. A child that ends by itself is an error with its last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapshotd.api.errors import BY_CODE, Internal, SnapshotError
from snapshotd.transport.device.control import MESSAGE_BYTES

log = logging.getLogger(__name__)

_PACKAGES = Path(__file__).resolve().parents[3]
_LAST_WORDS_BYTES = 2000
#: A child starts in a fraction of a second; many at a time on a busy machine wait for each other.
READY_S = 10.0
#: A killed process is normally gone in a millisecond; one that hangs inside the kernel is left to be reaped later.
_REAP_S = 5.0


class Child:
    """One process. On the loop that started it."""

    def __init__(self, module: str, process: asyncio.subprocess.Process, line: socket.socket, words: int) -> None:
        self._module, self._process, self._line, self._words = module, process, line, words
        self._pidfd = os.pidfd_open(process.pid)
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line, self._read)
        self._open = True
        #: It has said what it cannot get over: all it still does is tell the other end.
        self.gave_up = False

    @classmethod
    async def start(cls, module: str, settings: dict[str, Any], fds: Sequence[int] = ()) -> Child:
        """It runs, and has its settings. Internal if no process can be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = os.memfd_create("last words", os.MFD_CLOEXEC)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", module),
                    stdin=theirs.fileno(),
                    stdout=words,
                    stderr=words,
                    start_new_session=True,
                    cwd="/",
                    env=_environment(),
                )
        except BaseException as error:
            ours.close()
            os.close(words)
            if isinstance(error, OSError):
                raise Internal(f"no process for {module} can be started: {error.strerror}") from error
            raise
        ours.setblocking(False)
        child = cls(module, process, ours, words)
        child.say(settings, fds)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Few enough that they always fit; to a child that is gone nothing needs to be said."""
        if not self._open:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)

    async def ready(self) -> None:
        """It has all it needs. Internal if it hangs: whoever asked for it can still choose another way."""
        try:
            async with asyncio.timeout(READY_S):
                await self.hear()
        except TimeoutError as error:
            words = self._last_words() or "no word"
            raise Internal(f"{self._module} (pid {self.pid}) was not ready in {READY_S:.0f} s: {words}") from error

    async def hear(self) -> dict[str, Any]:
        """The next message. What the child cannot get over is raised, as is its end."""
        message = await self._heard.get()
        if "error" in message:
            self.gave_up = True
            raise trouble(str(message["code"]), str(message["error"]))
        if "ended" in message:
            self._heard.put_nowait(message)  # the same for whoever asks again
            status = await self._process.wait()
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise Internal(f"{self._module} (pid {self.pid}) ended with {how}: {self._last_words() or 'no word'}")
        return message

    def kill(self) -> None:
        # Not process.kill(): that looks whether it has ended, and so takes its status from who waits for it.
        if self._open:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> None:
        """Twice is once."""
        if not self._open:
            return
        self.kill()
        self._open = False
        self._loop.remove_reader(self._line)
        self._line.close()
        os.close(self._pidfd)
        try:
            async with asyncio.timeout(_REAP_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s (pid %d) was killed and is not gone after %.0f s", self._module, self.pid, _REAP_S)
        finally:
            os.close(self._words)

    def _read(self) -> None:
        try:
            blob = self._line.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended before it had read everything
            blob = b""
        if blob:
            self._heard.put_nowait(json.loads(blob))
        else:
            self._loop.remove_reader(self._line)
            self._heard.put_nowait({"ended": True})

    def _last_words(self) -> str:
        size = os.fstat(self._words).st_size
        tail = os.pread(self._words, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        return tail.decode(errors="replace").strip()


def trouble(code: str, message: str) -> SnapshotError:
    """The error that a child names by its code."""
    return BY_CODE.get(code, Internal)(message)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGES), kept.get("PYTHONPATH")]))
    return kept
