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
from collections.abc import Sequence
from typing import Any

from snapshotd.api.errors import BY_CODE, Internal, SnapshotError
from snapshotd.runtime.child_process import REAP_S, ChildProcess, start
from snapshotd.transport.device.control_socket import MESSAGE_BYTES

log = logging.getLogger(__name__)

#: A child starts in a fraction of a second. Many at a time on a busy machine take longer.
READY_S = 10.0


class Child:
    """One process. Used on the loop that started it."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(child.line, self._read)
        self._loop.add_reader(self._pidfd, self._note_exit)
        self._open = True
        #: It has reported a final error: all it still does is send the reason to the peer.
        self.gave_up = False

    @classmethod
    async def start(
        cls, module: str, settings: dict[str, Any], fds: Sequence[int] = (), *, library_dir: str = ""
    ) -> Child:
        """Starts it and sends its settings. Internal if no process can be started."""
        started = start(module, site_packages=True, library_dir=library_dir)
        started.line.setblocking(False)
        child = cls(started)
        child.say(settings, fds)
        return child

    @property
    def pid(self) -> int:
        return self._child.pid

    def say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Does not block: the messages are so few that they always fit. Does nothing if the child is gone."""
        if not self._open:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._child.line, [json.dumps(message).encode()], fds)

    async def ready(self, limit_s: float | None = None) -> None:
        """Waits until the child has started. Internal if it hangs: the caller can still use the image channel."""
        limit_s = READY_S if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self.hear()
        except TimeoutError as error:
            output = self._child.last_output() or "no output"
            raise Internal(
                f"{self._child.module} (pid {self.pid}) was not ready in {limit_s:.0f} s: {output}"
            ) from error

    async def hear(self) -> dict[str, Any]:
        """The next message. Raises the child's final error, or Internal when it has exited."""
        message = await self._heard.get()
        if "error" in message:
            self.gave_up = True
            raise child_error(str(message["code"]), str(message["error"]))
        if "ended" in message:
            self._heard.put_nowait(message)  # the same for every further call
            status = await self._status()
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise Internal(
                f"{self._child.module} (pid {self.pid}) exited with {how}: {self._child.last_output() or 'no output'}"
            )
        return message

    def kill(self) -> None:
        # Not process.kill(), which reaps the child if it has exited: `_note_exit` does that.
        if self._open:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self.kill()
        self._open = False
        self._loop.remove_reader(self._child.line)
        try:
            async with asyncio.timeout(REAP_S):
                await asyncio.shield(self._exited)
        except TimeoutError:
            log.warning("%s (pid %d) was killed and still exists after %.0f s", self._child.module, self.pid, REAP_S)
        finally:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._child.close()

    async def _status(self) -> int:
        await asyncio.shield(self._exited)
        return self._child.process.wait()

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._child.process.wait()  # does not block: it has exited
        if not self._exited.done():
            self._exited.set_result(None)

    def _read(self) -> None:
        try:
            blob = self._child.line.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it exited before it had read everything
            blob = b""
        if blob:
            self._heard.put_nowait(json.loads(blob))
        else:
            self._loop.remove_reader(self._child.line)
            self._heard.put_nowait({"ended": True})


def child_error(code: str, message: str) -> SnapshotError:
    """The error of the taxonomy that a child reported by its code."""
    return BY_CODE.get(code, Internal)(message)
