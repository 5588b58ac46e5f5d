"""The target's side of the device-memory channel: one port for a move, and one child process per stripe.

Invariant: only announced names are written, and only by the move's source (handshake.py), with what was verified. A broken
connection may be replaced within LOST_S. After the first failure nothing more is written. `close` leaves no process, no
socket, no thread and no task, and the files as they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Denied, Full, Internal, SnapshotError, Timeout, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake
from snapshotd.transport.device.child import Child, child_error
from snapshotd.transport.device.stripe_names import checked, purpose_of
from snapshotd.transport.keys import Keys
from snapshotd.transport.listener import KEY_BYTES, MAX_PENDING, MoveListener

log = logging.getLogger(__name__)

_RECEIVE = "snapshotd.transport.device.receive"
#: How long a broken connection may take to be replaced.
LOST_S = 10.0
#: How long a peer that is refused may take to close its connection.
_HANG_UP_S = 5.0


class _Stripe:
    """One file that is being received."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.child: Child | None = None
        self.at = 0
        self.watch: asyncio.Task[int] | None = None


class Incoming:
    """The stripes of one move that are being received. Used on the loop that created it."""

    def __init__(
        self,
        names: Sequence[str],
        hosts: Sequence[str],
        data_addresses: Sequence[str],
        source_node: str,
        credentials: Credentials,
        loop: asyncio.AbstractEventLoop,
        *,
        encrypted: bool,
    ) -> None:
        """In a thread: resolving `hosts` may block."""
        self._stripes = [_Stripe(name) for name in checked(names)]
        self._source_node, self._credentials, self._loop, self._encrypted = source_node, credentials, loop, encrypted
        self._channel = f"device-memory channel from {source_node}"
        self._listener = MoveListener(
            self._channel,
            hosts,
            self._admit,
            data_addresses=data_addresses,
            tls=handshake.tls_context(credentials, server_side=True),
            max_pending=MAX_PENDING + len(names),
        )
        self.port, self.endpoints = self._listener.port, self._listener.endpoints
        self.key = secrets.token_bytes(KEY_BYTES)
        #: The first failure, as soon as it is known.
        self.failed: SnapshotError | None = None

    @classmethod
    async def open(
        cls,
        folder: Path,
        names: Sequence[str],
        hosts: Sequence[str],
        source_node: str,
        credentials: Credentials,
        *,
        encrypted: bool,
        expected_bytes: int = 0,
        data_addresses: Sequence[str] = (),
        ring_bytes: int = 0,
    ) -> Incoming:
        """Listens as MoveListener describes; starts one child per name; each creates its file.

        `expected_bytes`: the size of all stripes together, a hint for memory to reserve; Full if less is free.
        `ring_bytes`: of the ring for each stripe, which another process empties; 0: files that keep all of it."""
        checked(names)
        await in_thread(_check_room, folder, expected_bytes)
        loop = asyncio.get_running_loop()
        incoming = await in_thread(
            cls, names, hosts, data_addresses, source_node, credentials, loop, encrypted=encrypted
        )
        try:
            for stripe in incoming._stripes:
                settings = {
                    "path": str(folder / stripe.name),
                    "expected_bytes": expected_bytes // len(names),
                    "ring_bytes": ring_bytes,
                }
                stripe.child = await Child.start(_RECEIVE, settings)
            for stripe in incoming._stripes:
                assert stripe.child is not None
                await stripe.child.ready()
        except BaseException:
            await incoming.close()
            raise
        for stripe in incoming._stripes:
            stripe.watch = asyncio.create_task(incoming._watch(stripe), name=f"stripe {stripe.name}")
            stripe.watch.add_done_callback(incoming._ended)
        incoming._listener.start()
        return incoming

    @property
    def received_bytes(self) -> int:
        """Bytes that are verified and stored."""
        return sum(stripe.at for stripe in self._stripes)

    async def wait(self, timeout_s: float) -> Mapping[str, int]:
        """The final sizes. Raises Unreachable (a connection broke and was not replaced in LOST_S), Damaged, Full, Timeout."""
        watches = {stripe.name: stripe.watch for stripe in self._stripes if stripe.watch is not None}
        _, pending = await asyncio.wait(watches.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if self.failed is not None:
            raise self.failed
        if any(watch.cancelled() for watch in watches.values()):
            raise Internal("the device-memory channel was closed before all stripes had arrived")
        if pending:
            late = [name for name, watch in watches.items() if watch in pending]
            raise Timeout(f"{', '.join(late)} did not arrive within {timeout_s:.0f} s")
        return {name: watch.result() for name, watch in watches.items()}

    async def close(self) -> None:
        """Idempotent."""
        self._kill_children()  # before anything is waited for
        watches = [stripe.watch for stripe in self._stripes if stripe.watch is not None]
        for watch in watches:
            watch.cancel()
        await in_thread(self._listener.close)
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.gather(*(stripe.child.close() for stripe in self._stripes if stripe.child is not None))

    def _kill_children(self, *, spare_failed: bool = False) -> None:
        for stripe in self._stripes:
            if stripe.child is not None and not (spare_failed and stripe.child.gave_up):
                stripe.child.kill()

    def _ended(self, task: asyncio.Task[int]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, SnapshotError):
            log.error("receiving a stripe failed unexpectedly", exc_info=error)
            error = Internal(f"receiving a stripe failed unexpectedly: {error!r}")
        self.fail(error)

    def fail(self, error: SnapshotError) -> None:
        """Receives nothing more. The first failure counts."""
        if self.failed is None:
            log.warning("device memory from %s: %s: %s", self._source_node, error.code, error.message)
            self.failed = error
        self._listener.stop()  # the source learns at once that connecting again is useless
        # A child that reported a failure writes no more, and may still have to send the reason to the source.
        self._kill_children(spare_failed=True)

    # ------------------------------------------------------------ connections

    def _admit(self, connection: socket.socket) -> None:
        """Passes the connection to the child of its stripe, if the peer is the source. In the connection's thread."""
        assert isinstance(connection, ssl.SSLSocket)
        try:
            number = self._stripe_of(
                handshake.prove_source(connection, self.key, self._credentials, self._source_node, self._channel)
            )
        except SnapshotError as error:
            handshake.refuse(connection, error, _HANG_UP_S)
            raise
        keys = handshake.welcome(connection)
        connection.settimeout(None)
        # Detached: from here on it is `_hand_over` that closes it. The loop runs that before `close` returns.
        proven = socket.socket(fileno=connection.detach())
        try:
            self._loop.call_soon_threadsafe(self._hand_over, proven, number, keys)
        except RuntimeError:  # the daemon is exiting, its loop is closed
            proven.close()

    def _stripe_of(self, purpose: bytes) -> int:
        """The number of the stripe that the source names. Denied if there is none: both sides must mean the same file."""
        for number, stripe in enumerate(self._stripes):
            if purpose == purpose_of(number, stripe.name):
                return number
        raise Denied(f"the {self._channel} has no stripe {purpose!r}")

    def _hand_over(self, connection: socket.socket, number: int, keys: Keys) -> None:
        child = self._stripes[number].child
        assert child is not None
        with connection:
            child.say(keys.message() if self._encrypted else {}, [connection.fileno()])

    async def _watch(self, stripe: _Stripe) -> int:
        """The final size of a stripe, once all of it has arrived."""
        assert stripe.child is not None
        loop = asyncio.get_running_loop()
        lost: SnapshotError | None = None
        ends_s: float | None = None
        while True:
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await stripe.child.hear()
            except TimeoutError as error:
                raise lost or Unreachable(f"the connection of {stripe.name} was lost") from error
            stripe.at = int(message.get("at", stripe.at))
            if "done" in message:
                return stripe.at
            if "connected" in message:
                ends_s = None
            if "lost" in message:
                lost = child_error(message["code"], f"{stripe.name} from node {self._source_node}: {message['lost']}")
                log.warning("%s; waiting %.0f s for a new connection", lost.message, LOST_S)
                ends_s = loop.time() + LOST_S


def _check_room(folder: Path, expected_bytes: int) -> None:
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    if expected_bytes > free_bytes:
        raise Full(
            f"{expected_bytes >> 20} MiB of device memory are expected, {free_bytes >> 20} MiB are free in {folder}"
        )
