"""The work of the network process: it listens, passes calls on in both directions, and ends with the link.

It knows nothing but what the daemon sends over the link: addresses first, then certificates, again whenever they change.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import cast

import grpc
import grpc.aio

from snapshotd.api.addresses import split_address
from snapshotd.api.channel import COMMON_OPTIONS
from snapshotd.api.errors import BadConfig, Internal, SnapshotError
from snapshotd.api.metrics_http import MetricsServer
from snapshotd.network.accounts import CALLS_PER_CALLER
from snapshotd.network.frames import (
    FROM_DAEMON,
    METRICS,
    Close,
    Files,
    Listening,
    NotListening,
    Request,
    Settings,
    Stop,
)
from snapshotd.network.inbound import Inbound
from snapshotd.network.link import Control, Link
from snapshotd.network.outbound import Contents, Outbound
from snapshotd.runtime import heap

log = logging.getLogger(__name__)

#: How often freed memory is returned to the kernel: gRPC's threads allocate much for a moment.
GIVE_BACK_S = 30.0
#: A connection without a certificate costs memory and a descriptor for no longer than this; the default is 120 s.
HANDSHAKE_MS = 10_000

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # otherwise a second daemon on the same port would silently receive half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_concurrent_streams", CALLS_PER_CALLER),  # of one connection; network/accounts.py counts them all
)


class Network:
    """One network process."""

    def __init__(self) -> None:
        self._outbound = Outbound(lambda: self._contents)
        self.link = Link(FROM_DAEMON, self._outbound.serve, self._control, first=1)
        self.inbound = Inbound(self.link)
        self._settings: Settings | None = None
        self._contents: Contents = (b"", b"", b"")
        self._server: grpc.aio.Server | None = None
        self._metrics = MetricsServer(self._exposition)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, end: socket.socket) -> None:
        """Serves until the daemon closes the link."""
        await self.link.attach(end)
        giving_back = asyncio.create_task(_give_back(), name="give memory back")
        try:
            log.info("the network process ends: %s", await self.link.run())
        finally:
            giving_back.cancel()
            await self._close(0)

    def _control(self, frame: Control) -> None:
        match frame:
            case Settings():
                self._settings = frame
            case Files():
                first = not self._contents[0]
                self._contents = frame.ca, frame.cert, frame.key
                self.inbound.authorities.replace(frame.ca)
                self.inbound.revoked = frozenset(int(serial, 16) for serial in frame.revoked)
                if first:
                    self._start(self._listen())
            case Close():
                self._outbound.close(frame)
            case Stop():
                self._start(self._stop(frame.grace_s))
            case _:
                raise AssertionError("the decoder lets nothing else through")

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        try:
            port = await self._bind()
        except Exception as error:  # noqa: BLE001  (the daemon reports it)
            known = error if isinstance(error, SnapshotError) else Internal(f"{type(error).__name__}: {error}")
            self.link.send_soon(NotListening(known.to_wire()))
        else:
            self.link.send_soon(Listening(port))

    async def _bind(self) -> int:
        settings = self._settings
        assert settings is not None
        if settings.metrics_listen:
            await self._metrics.start(*split_address(settings.metrics_listen), "metrics_listen")
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self.inbound,))
        port = 0
        umask = os.umask(0o177)  # at no time can users other than this one and root connect
        try:
            if settings.admin_socket:
                self._server.add_insecure_port(f"unix:{settings.admin_socket}")
        except RuntimeError as error:
            raise BadConfig(f"cannot listen on {settings.admin_socket}: {error}") from error
        finally:
            os.umask(umask)
        try:
            if settings.listen:
                port = self._server.add_secure_port(settings.listen, self._server_credentials())
        except RuntimeError as error:
            reason = _why_not_bound(settings.listen) or str(error)
            raise BadConfig(f"listen: cannot listen on {settings.listen}: {reason}") from error
        await self._server.start()
        return port

    def _server_credentials(self) -> grpc.ServerCredentials:
        """Requires a certificate of the same CA from every client. New contents are used for new connections."""
        used = [self._contents]

        def configuration() -> grpc.ServerCertificateConfiguration:
            ca, cert, key = used[0]
            return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

        def replaced() -> grpc.ServerCertificateConfiguration | None:
            if used[0] is self._contents:
                return None
            used[0] = self._contents
            return configuration()

        # The type stubs do not know that None means: as before.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", replaced)
        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)

    async def _stop(self, grace_s: float) -> None:
        await self._close(grace_s)
        self.link.close()

    async def _close(self, grace_s: float) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
        await self._metrics.close()

    async def _exposition(self) -> tuple[str, bytes]:
        """The metrics, from the daemon (runtime/metrics.py). Raises CallFailed."""
        call = self.link.open(lambda number: Request(number, METRICS, "root", "metrics", []))
        try:
            kind, text = await call.read() or b"", await call.read() or b""
        finally:
            call.cancel()
        return kind.decode(), text


def _why_not_bound(address: str) -> str:
    """Why the address cannot be bound: gRPC does not report it, so the bind is repeated here."""
    name, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except PermissionError:
        return (
            f"the network process has no privileges, so it cannot use port {port}: use one from 1024, or lower"
            " net.ipv4.ip_unprivileged_port_start"
        )
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def _give_back() -> None:
    while True:
        await asyncio.sleep(GIVE_BACK_S)
        await heap.give_back()
