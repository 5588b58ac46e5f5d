"""The source's side of the device-memory channel: one child and one connection per stripe, and a new one when that breaks.

Invariant: `wait` returns only when the target has confirmed that every stripe is verified and stored completely. Until
then, and after any failure, no file here is changed, and a ring only by its counter of what was sent. After the first
failure that a new connection cannot cure, nothing is sent any more: the fallback, the image channel, needs the network.
`close` leaves no process and no task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Internal, SnapshotError, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake
from snapshotd.transport.device.child import Child, child_error
from snapshotd.transport.device.stripe_names import checked, purpose_of
from snapshotd.transport.keys import Keys
from snapshotd.transport.listener import KEY_BYTES
from snapshotd.transport.routes import Route, in_turn
from snapshotd.transport.sockets import CONNECT_S, hang_up, tune

log = logging.getLogger(__name__)

_SEND = "snapshotd.transport.device.send"
#: How often a stripe's connection may break.
REOPENED = 3
#: How long to try to replace a broken connection. The target waits a little longer.
REOPEN_S = 6.0


@dataclass(frozen=True)
class Totals:
    """Bytes of the stripes by the way they travelled; what was sent again over a new connection counts again there."""

    bytes: int
    sent: int
    zero: int
    same: int
    seconds: float  # from the first byte that could be sent to the target's confirmation


class _Stripe:
    """One file that is being sent."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.grown = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.size = 0
        self.finished = False
        self.child: Child | None = None
        self.at = self.sent = self.zero = self.same = 0
        self.ended_s = 0.0
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self, message: dict[str, Any]) -> None:
        if "at" in message:
            self.at, self.sent, self.zero, self.same = (int(message[way]) for way in ("at", "sent", "zero", "same"))

    async def close(self) -> None:
        if self.child is not None:
            await self.child.close()
        if self.grown >= 0:
            os.close(self.grown)
            self.grown = -1


class Outgoing:
    """The stripes of one move that are being sent. Used on the loop that created it."""

    def __init__(
        self,
        routes: Sequence[Route],
        key: bytes,
        node: str,
        credentials: Credentials,
        context: ssl.SSLContext,
        names: Sequence[str],
        *,
        encrypted: bool,
    ) -> None:
        self._routes, self._key, self._node, self._encrypted = routes, key, node, encrypted
        self._credentials, self._context = credentials, context
        self._stripes = {name: _Stripe(number, name) for number, name in enumerate(checked(names))}
        self._tasks: list[asyncio.Task[None]] = []
        self._began_s: float | None = None
        #: The first failure, as soon as it is known.
        self.failed: SnapshotError | None = None

    @classmethod
    async def open(
        cls,
        routes: Sequence[Route],
        key: bytes,
        node: str,
        credentials: Credentials,
        folder: Path,
        names: Sequence[str],
        *,
        encrypted: bool,
        rings: bool = False,
    ) -> Outgoing:
        """Starts a child per name and connects it to the target `node`. The files need not exist yet. Unreachable, Denied.

        `rings`: the files here are rings (ring.py)."""
        if len(key) != KEY_BYTES:  # anybody holds an empty key
            raise Internal(f"node {node} sent a key of {len(key)} bytes for its device-memory channel, not {KEY_BYTES}")
        context = await in_thread(handshake.tls_context, credentials, server_side=False)
        outgoing = cls(routes, key, node, credentials, context, names, encrypted=encrypted)
        try:
            for stripe in outgoing._stripes.values():
                settings = {"path": str(folder / stripe.name), "ring": rings}
                stripe.child = await Child.start(_SEND, settings, [stripe.grown])
            for stripe in outgoing._stripes.values():
                task = asyncio.create_task(outgoing._carry(stripe), name=f"stripe {stripe.name}")
                task.add_done_callback(outgoing._note_failure)
                outgoing._tasks.append(task)
            for stripe, task in zip(outgoing._stripes.values(), outgoing._tasks, strict=True):
                await asyncio.wait([stripe.connected, task], return_when=asyncio.FIRST_COMPLETED)
            if outgoing.failed is not None:
                raise outgoing.failed
        except BaseException:
            await outgoing.close()
            raise
        return outgoing

    @property
    def sent_bytes(self) -> int:
        """Bytes of the stripes that were sent, zeros included: for a progress bar."""
        return sum(stripe.at for stripe in self._stripes.values())

    def advance(self, name: str, size: int) -> None:
        """The first `size` bytes of the file may be sent now. Cheap; a smaller number than before changes nothing. A ring
        says itself how much it has, once anything was announced."""
        stripe = self._stripes[name]
        if size <= stripe.size or stripe.finished or stripe.grown < 0:
            return
        self._began_s = self._began_s or monotonic()
        os.eventfd_write(stripe.grown, size - stripe.size)
        stripe.size = size

    def finish(self, sizes: Mapping[str, int]) -> None:
        """Sets the final sizes of all stripes. Idempotent."""
        if set(sizes) != set(self._stripes):
            raise Internal(f"final sizes of {sorted(sizes)}, but the stripes are {sorted(self._stripes)}")
        self._began_s = self._began_s or monotonic()
        for name, size in sizes.items():
            stripe = self._stripes[name]
            if stripe.child is not None and not stripe.finished:
                stripe.finished = True
                stripe.child.say({"final": size})

    async def wait(self) -> Totals:
        """Waits until the target has verified and stored everything. Raises Unreachable, Damaged, Full or Internal."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        if self.failed is not None:
            raise self.failed
        if any(task.cancelled() for task in self._tasks):
            raise Internal("the device-memory channel was closed before all stripes had arrived")
        stripes = self._stripes.values()
        return Totals(
            bytes=sum(stripe.at for stripe in stripes),
            sent=sum(stripe.sent for stripe in stripes),
            zero=sum(stripe.zero for stripe in stripes),
            same=sum(stripe.same for stripe in stripes),
            seconds=max(stripe.ended_s for stripe in stripes) - (self._began_s or 0.0),
        )

    async def close(self) -> None:
        """Kills the children. Idempotent."""
        for stripe in self._stripes.values():
            if stripe.child is not None:
                stripe.child.kill()  # before anything is waited for
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(stripe.close() for stripe in self._stripes.values()))

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, SnapshotError):
            log.error("sending a stripe failed unexpectedly", exc_info=error)
            error = Internal(f"sending a stripe failed unexpectedly: {error!r}")
        self.failed = self.failed or error
        for other in self._tasks:
            other.cancel()
        for stripe in self._stripes.values():
            if stripe.child is not None:
                stripe.child.kill()

    # ------------------------------------------------------------ one stripe

    async def _carry(self, stripe: _Stripe) -> None:
        """Until the target has the whole stripe; a connection that breaks is replaced."""
        assert stripe.child is not None
        await stripe.child.ready()
        connection, keys = await self._reach(stripe)
        why: SnapshotError | None = None  # other than that a connection broke
        for left in range(REOPENED, -1, -1):
            with connection:
                stripe.child.say(keys.message() if self._encrypted else {}, [connection.fileno()])
            message = await self._until_it_breaks(stripe)
            if message is None:
                return
            error = child_error(message["code"], f"{stripe.name} to node {self._node}: {message['lost']}")
            if not isinstance(error, Unreachable):
                why = error
            # Before the first byte the caller can still use the image channel.
            if not left or not stripe.connected.done():
                raise why or error
            log.warning("%s; opening a new connection", error.message)
            try:
                connection, keys = await self._reach_again(stripe)
            except Unreachable as unreachable:  # the target has given up, possibly for a reason that is known here
                raise why or unreachable from unreachable

    async def _until_it_breaks(self, stripe: _Stripe) -> dict[str, Any] | None:
        """The child's message about it; None when the whole stripe has arrived."""
        assert stripe.child is not None
        while True:
            message = await stripe.child.hear()
            stripe.note(message)
            if "connected" in message and not stripe.connected.done():
                stripe.connected.set_result(None)
            if "lost" in message:
                return message
            if "done" in message:
                stripe.ended_s = monotonic()
                return None

    async def _reach_again(self, stripe: _Stripe) -> tuple[socket.socket, Keys]:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unreachable),
            stop=stop_after_delay(REOPEN_S),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        ):
            with attempt:
                return await self._reach(stripe)
        raise AssertionError("tenacity ends with a value or an error")

    async def _reach(self, stripe: _Stripe) -> tuple[socket.socket, Keys]:
        """A connection whose peer is the target, and the connection's own keys."""
        failed: Unreachable | None = None
        for route, limit_s in in_turn(self._routes, stripe.number):
            try:
                return await self._reach_by(route, limit_s, stripe)
            except Unreachable as error:
                if len(self._routes) > 1:  # else the caller says it
                    log.warning("no connection for device memory: %s", error.message)
                failed = failed or error
        assert failed is not None
        raise failed

    async def _reach_by(self, route: Route, limit_s: float, stripe: _Stripe) -> tuple[socket.socket, Keys]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s) as limit:
                found = await loop.getaddrinfo(route.host, route.port, type=socket.SOCK_STREAM)
                family, *_, address = found[0]
                connection = socket.socket(family, socket.SOCK_STREAM)
                try:
                    tune(connection)
                    connection.setblocking(False)
                    if route.own:
                        connection.bind((route.own, 0))
                    await loop.sock_connect(connection, address)
                    limit.reschedule(loop.time() + CONNECT_S)
                    connection.settimeout(CONNECT_S)
                    return await self._join(connection, purpose_of(stripe.number, stripe.name))
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError as error:
            raise Unreachable(f"node {self._node} at {route}: no answer within {limit_s:.0f} s") from error
        except OSError as error:
            # asyncio's own text names no cause; the number of an SSLError is not one of the system's.
            unnamed = not error.errno or isinstance(error, ssl.SSLError)
            why = str(error) if unnamed else os.strerror(error.errno or 0)
            raise Unreachable(f"node {self._node} at {route}: {why}") from error

    async def _join(self, connection: socket.socket, purpose: bytes) -> tuple[socket.socket, Keys]:
        """The handshake, in a thread that ends at once if this is cancelled."""
        with connection.dup() as same:
            about = (self._key, self._context, self._credentials, self._node, purpose)
            joining = asyncio.create_task(in_thread(handshake.join, connection, *about))
            try:
                return await asyncio.shield(joining)
            except asyncio.CancelledError:
                hang_up(same)
                await asyncio.wait([joining])
                if not joining.cancelled() and joining.exception() is None:
                    joining.result()[0].close()
                raise
