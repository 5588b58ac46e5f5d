"""One child process as its daemon sees it: starts it, exchanges messages with it, passes descriptors, kills it.

Invariant: `close` returns only when the process is gone. A child that exits by itself is an error that quotes its output.
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
from snapshotd.transport.device.control_socket import MESSAGE_BYTES

log = logging.getLogger(__name__)

_PACKAGES = Path(__file__).resolve().parents[3]
_OUTPUT_BYTES = 2000
#: A child starts in a fraction of a second. Many at a time on a busy machine take longer.
READY_S = 10.0
#: A killed process is normally gone in a millisecond. One that hangs in the kernel is reaped later.
_REAP_S = 5.0


class Child:
    """One process. Used on the loop that started it."""

    def __init__(self, module: str, process: asyncio.subprocess.Process, line: socket.socket, output: int) -> None:
        self._module, self._process, self._line, self._output = module, process, line, output
        self._pidfd = os.pidfd_open(process.pid)
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line, self._read)
        self._open = True
        #: It has reported a final error: all it still does is send the reason to the peer.
        self.gave_up = False

    @classmethod
    async def start(cls, module: str, settings: dict[str, Any], fds: Sequence[int] = ()) -> Child:
        """Starts it and sends its settings. Internal if no process can be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.memfd_create("child output", os.MFD_CLOEXEC)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", module),
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    cwd="/",
                    env=_environment(),
                )
        except BaseException as error:
            ours.close()
            os.close(output)
            if isinstance(error, OSError):
                raise Internal(f"{module} cannot be started: {error.strerror}") from error
            raise
        ours.setblocking(False)
        child = cls(module, process, ours, output)
        child.say(settings, fds)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Does not block: the messages are so few that they always fit. Does nothing if the child is gone."""
        if not self._open:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)

    async def ready(self) -> None:
        """Waits until the child has started. Internal if it hangs: the caller can still use the image channel."""
        try:
            async with asyncio.timeout(READY_S):
                await self.hear()
        except TimeoutError as error:
            output = self._last_output() or "no output"
            raise Internal(f"{self._module} (pid {self.pid}) was not ready in {READY_S:.0f} s: {output}") from error

    async def hear(self) -> dict[str, Any]:
        """The next message. Raises the child's final error, or Internal when it has exited."""
        message = await self._heard.get()
        if "error" in message:
            self.gave_up = True
            raise child_error(str(message["code"]), str(message["error"]))
        if "ended" in message:
            self._heard.put_nowait(message)  # the same for every further call
            status = await self._process.wait()
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise Internal(f"{self._module} (pid {self.pid}) exited with {how}: {self._last_output() or 'no output'}")
        return message

    def kill(self) -> None:
        # Not process.kill(): that polls the child first, and so takes its exit status from asyncio's waiter.
        if self._open:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> None:
        """Idempotent."""
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
            log.warning("%s (pid %d) was killed and still exists after %.0f s", self._module, self.pid, _REAP_S)
        finally:
            os.close(self._output)

    def _read(self) -> None:
        try:
            blob = self._line.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it exited before it had read everything
            blob = b""
        if blob:
            self._heard.put_nowait(json.loads(blob))
        else:
            self._loop.remove_reader(self._line)
            self._heard.put_nowait({"ended": True})

    def _last_output(self) -> str:
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, _OUTPUT_BYTES, max(0, size - _OUTPUT_BYTES))
        return tail.decode(errors="replace").strip()


def child_error(code: str, message: str) -> SnapshotError:
    """The error of the taxonomy that a child reported by its code."""
    return BY_CODE.get(code, Internal)(message)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGES), kept.get("PYTHONPATH")]))
    return kept
