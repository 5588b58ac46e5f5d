"""The target's end of the stripes: one port for a move, who connects to it, and a child for each stripe.

Invariant: only announced names are written, only by who holds the lane's key, which the source alone was given. A
file's size is what is verified and stored. A connection that breaks may come back for LOST_S; after the first failure
no file grows any more; `close` leaves no process, no socket and no task, and the files as they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api.errors import Full, Internal, SnapshotError, Timeout, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.child import Child, trouble
from snapshotd.transport.device.key import KEY_BYTES, prove_target
from snapshotd.transport.device.names import checked
from snapshotd.transport.image.tls_connection import CONNECT_S, tune

log = logging.getLogger(__name__)

_RECEIVE = "snapshotd.transport.device.receive"
#: How long a connection that broke may take to come back.
LOST_S = 10.0
#: Strangers may connect, and have CONNECT_S to show what they know; of more at a time than so many, and one per stripe, the
#: oldest is sent away: the source needs a moment only, and who says nothing must not keep it out.
_MAX_STRANGERS = 32
#: After an error of accept, most often no descriptor is left: who waits in the queue is still there afterwards.
_PAUSE_S = 0.2


class _Stripe:
    """One file on its way."""

    def __init__(self, name: str, child: Child) -> None:
        self.name, self.child = name, child
        self.at = 0
        self.watch: asyncio.Task[int] | None = None


class Incoming:
    """The stripes of one move on their way here. On the loop that made it."""

    def __init__(self, listener: socket.socket, source_node: str, *, encrypted: bool) -> None:
        self._listener, self._source_node, self._encrypted = listener, source_node, encrypted
        self._stripes: list[_Stripe] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._strangers: list[asyncio.Task[Any]] = []  # the oldest first
        self.port: int = listener.getsockname()[1]
        self.key = secrets.token_bytes(KEY_BYTES)
        #: What went wrong first, as soon as it is known.
        self.failed: SnapshotError | None = None

    @classmethod
    async def open(
        cls,
        folder: Path,
        names: Sequence[str],
        hosts: Sequence[str],
        source_node: str,
        *,
        encrypted: bool,
        expected_bytes: int = 0,
    ) -> Incoming:
        """Listens, at the first of `hosts` that is this machine's own; one child per name; the files are there and empty.

        `expected_bytes`: of all stripes together, a hint for the room to take ahead; Full when there is less."""
        checked(names)
        await in_thread(_check_room, folder, expected_bytes)
        incoming = cls(await in_thread(_listen, hosts), source_node, encrypted=encrypted)
        try:
            for name in names:
                settings = {"path": str(folder / name), "expected_bytes": expected_bytes // len(names)}
                child = await Child.start(_RECEIVE, settings)
                incoming._stripes.append(_Stripe(name, child))
            for stripe in incoming._stripes:
                await stripe.child.ready()
        except BaseException:
            await incoming.close()
            raise
        for stripe in incoming._stripes:
            stripe.watch = incoming._begin(incoming._watch(stripe), f"stripe {stripe.name}")
        incoming._listen()
        return incoming

    @property
    def received_bytes(self) -> int:
        """Verified and in the files."""
        return sum(stripe.at for stripe in self._stripes)

    async def wait(self, timeout_s: float) -> Mapping[str, int]:
        """The final sizes. Raises Unreachable (a connection is lost, not back in LOST_S), Damaged, Full, Timeout."""
        watches = {stripe.name: stripe.watch for stripe in self._stripes if stripe.watch is not None}
        _, pending = await asyncio.wait(watches.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if self.failed is not None:
            raise self.failed
        if any(watch.cancelled() for watch in watches.values()):
            raise Internal("the stripes were closed before they had arrived")
        if pending:
            late = [name for name, watch in watches.items() if watch in pending]
            raise Timeout(f"{', '.join(late)} did not arrive within {timeout_s:.0f} s")
        return {name: watch.result() for name, watch in watches.items()}

    async def close(self) -> None:
        """Twice is once."""
        for stripe in self._stripes:
            stripe.child.kill()  # before anything is waited for
        self._stop_listening()
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.gather(*(stripe.child.close() for stripe in self._stripes))

    def _begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, SnapshotError):
            log.error("receiving a stripe failed unexpectedly", exc_info=error)
            error = Internal(f"receiving a stripe failed unexpectedly: {error!r}")
        if self.failed is None:
            log.warning("the stripes of %s: %s: %s", self._source_node, error.code, error.message)
            self.failed = error
        self._stop_listening()  # the source learns at once that nothing helps any more
        for stripe in self._stripes:
            if not stripe.child.gave_up:  # who did writes no more, and the source may not know yet why
                stripe.child.kill()

    # ------------------------------------------------------------ connections

    def _listen(self) -> None:
        # Not loop.sock_accept: cancelled when somebody has just come, it forgets them.
        self._paused = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _stop_listening(self) -> None:
        """Twice is once."""
        if self._paused is not None:
            self._paused.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone already
            return
        except OSError as error:
            log.warning("the stripes of %s: nobody can be let in now: %s", self._source_node, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._paused = loop.call_later(_PAUSE_S, self._listen)
            return
        if len(self._strangers) >= _MAX_STRANGERS + len(self._stripes):
            self._strangers.pop(0).cancel()
        stranger = self._begin(self._admit(connection, address), "stranger")
        self._strangers.append(stranger)
        stranger.add_done_callback(lambda _: self._forget(stranger, connection))

    async def _admit(self, connection: socket.socket, address: Any) -> None:
        """Hands it to the child of its stripe, if it holds the key."""
        names = [stripe.name for stripe in self._stripes]
        try:
            connection.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                number, keys = await prove_target(connection, self.key, names)
            connection.setblocking(True)
            self._stripes[number].child.say(keys.message() if self._encrypted else {}, [connection.fileno()])
        except (SnapshotError, OSError) as error:  # TimeoutError is one
            why = str(error) or f"it did not say who it is within {CONNECT_S:.0f} s"
            log.warning("the stripes of %s: %s is not let in: %s", self._source_node, address, why)

    def _forget(self, stranger: asyncio.Task[Any], connection: socket.socket) -> None:
        """Not in the task: one that is cancelled before it began would leave the connection open."""
        connection.close()
        if stranger in self._strangers:
            self._strangers.remove(stranger)

    async def _watch(self, stripe: _Stripe) -> int:
        """The final size of a stripe that arrived."""
        loop = asyncio.get_running_loop()
        lost: SnapshotError | None = None
        ends_s: float | None = None
        while True:
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await stripe.child.hear()
            except TimeoutError as error:
                raise lost or Unreachable(f"{stripe.name} was lost") from error
            stripe.at = int(message.get("at", stripe.at))
            if "done" in message:
                return stripe.at
            if "connected" in message:
                ends_s = None
            if "lost" in message:
                lost = trouble(message["code"], f"{stripe.name} from node {self._source_node}: {message['lost']}")
                log.warning("%s; waiting for it to come back", lost.message)
                ends_s = loop.time() + LOST_S


def _check_room(folder: Path, expected_bytes: int) -> None:
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    if expected_bytes > free_bytes:
        raise Full(
            f"device memory of {expected_bytes >> 20} MiB is to come, {free_bytes >> 20} MiB are free in {folder}"
        )


def _listen(hosts: Sequence[str]) -> socket.socket:
    failures = []
    for host in hosts:
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                tune(listener)
                listener.bind(address)
                listener.listen()
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
        except OSError as error:  # advertised, but translated on the way: not an address of this machine
            failures.append(f"{host}: {error.strerror or error}")
            continue
        return listener
    raise Internal(f"no port to receive device memory on: {'; '.join(failures)}")
