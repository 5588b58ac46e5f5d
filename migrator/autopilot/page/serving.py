"""Serves the page beside the autopilot: address, TLS and the HTTP server.

Invariants: without TLS the page is served on a loopback address only, and only if that was asked for. A failure of the page
never stops the autopilot once it runs; a configuration that cannot work is refused before it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from migrator.autopilot.page.access import Certificates, Tokens
from migrator.autopilot.page.app import CERTIFICATE, App
from migrator.autopilot.page.feed import Feed
from snapshotd.api.errors import BadConfig, Usage

log = logging.getLogger(__name__)

#: Connections at a time, of all viewers and of one address. Each open page has one for news. The autopilot needs its file
#: descriptors for the nodes.
CONNECTIONS, PER_ADDRESS = 256, 32
#: How long a connection may stay without a request.
FIRST_REQUEST_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where the page is served."""

    address: str
    port: int
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None  # of certificates of operators

    @classmethod
    def of(
        cls,
        address: str,
        port: int,
        cert: Path | None,
        key: Path | None,
        *,
        plain: bool,
        client_ca: Path | None = None,
    ) -> Place:
        """`address` is an IP address. Raises Usage if the page must not be served that way."""
        if plain:
            if client_ca is not None:
                raise Usage(
                    "--page-client-ca needs TLS, and --page-plain-http serves the page without it",
                    remedy="give a certificate for the page with --page-cert and --page-key",
                )
            if not ipaddress.ip_address(address).is_loopback:
                raise Usage(
                    "--page-plain-http is allowed on a loopback address only: tokens would be readable on the network",
                    remedy="use --page 127.0.0.1:PORT, or give a certificate with --page-cert and --page-key",
                )
            return cls(address, port)
        if cert is None or key is None:
            raise Usage(
                "the page needs a certificate: --page-cert and --page-key",
                remedy="use one for this machine, such as its snapshotd's, or --page 127.0.0.1:PORT --page-plain-http",
            )
        return cls(address, port, cert, key, client_ca)

    def listen(self) -> socket.socket:
        """A listener there, in the network namespace of the calling thread. Raises BadConfig if the place cannot be used."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = _Listener(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.address, self.port))
            listener.listen(128)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise BadConfig(
                f"the page cannot be served at {self.address} port {self.port}: {error.strerror}",
                remedy="choose an address of this machine and a free port",
            ) from error
        return listener


class _Listener(socket.socket):
    """Limits all connections, also those whose TLS handshake is not complete: the server does not know them yet. There may
    be twice as many as in use, so that the server can close an idle one in favour of a new one."""

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self._open: list[tuple[socket.socket, str]] = []

    def accept(self) -> tuple[socket.socket, Any]:
        made, address = super().accept()
        origin = _origin(address)
        self._open = [one for one in self._open if one[0].fileno() >= 0]
        mine = sum(one[1] == origin for one in self._open)
        if mine >= 2 * PER_ADDRESS or len(self._open) >= 2 * CONNECTIONS:
            made.close()
            raise ConnectionAbortedError  # asyncio accepts the next one later
        self._open.append((made, origin))
        return made, address


class _Connection(H11Protocol):
    """Anybody can connect. Of too many connections the oldest one without a request is closed, or the new one if all of
    them have one: no address can use up what others need. Connections that ask for nothing are closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.origin, self.since_s = _origin(self.client), self.loop.time()
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and (shown := tls.getpeercert(binary_form=True)):
            self.app_state = {**self.app_state, CERTIFICATE: ssl.DER_cert_to_PEM_cert(shown).encode()}
        every = [one for one in self.connections if isinstance(one, _Connection)]
        mine = [one for one in every if one.origin == self.origin]
        for found, limit in ((mine, PER_ADDRESS), (every, CONNECTIONS)):
            if len(found) > limit:
                idle = [one for one in found if one.is_idle and one is not self]
                min(idle, key=lambda one: one.since_s, default=self).drop()
                break
        self.loop.call_later(FIRST_REQUEST_S, self._close_if_silent)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        # Its declared type hides that it is None before the first request.
        return getattr(self, "cycle", None) is None or self.cycle.response_complete

    def drop(self) -> None:
        """Closes it, and frees its place at once."""
        self.connections.discard(self)
        self.transport.abort()

    def _close_if_silent(self) -> None:
        if getattr(self, "cycle", None) is None:
            self.transport.abort()


def _origin(client: Sequence[Any] | None) -> str:
    """What counts as one address: of IPv6 a whole /64, because every machine there has all of its addresses."""
    if client is None:
        return ""
    address = ipaddress.ip_address(client[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The autopilot has its own handlers."""
        yield


@contextlib.asynccontextmanager
async def serving(
    place: Place, listener: socket.socket, feed: Feed, tokens: Tokens, nodes: list[str], more: Sequence[Route] = ()
) -> AsyncIterator[str]:
    """Serves the page while the context lasts. Yields its address. `listener` is that of the place; it is closed. `more`:
    what is served beside it, such as the webhook."""
    try:
        certificates = Certificates(place.client_ca) if place.client_ca is not None else None
    except BadConfig:
        listener.close()
        raise
    config = uvicorn.Config(
        App(feed, tokens, nodes, certificates).asgi(local=place.cert is None, more=more),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=place.cert,
        ssl_keyfile=place.key,
        ssl_ca_certs=str(place.client_ca) if place.client_ca is not None else None,
        # Those who only read need none. One of another CA, or an expired one, ends the connection.
        ssl_cert_reqs=ssl.CERT_OPTIONAL if place.client_ca is not None else ssl.CERT_NONE,
    )
    try:
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    except (OSError, ssl.SSLError) as error:
        listener.close()
        clients = f", or the CA {place.client_ca}," if place.client_ca is not None else ""
        raise BadConfig(
            f"the certificate {place.cert} with the key {place.key}{clients} cannot be used: {error}",
            remedy="name PEM files that this user can read",
        ) from error
    host = f"[{place.address}]" if ":" in place.address else place.address
    url = f"{'http' if place.cert is None else 'https'}://{host}:{listener.getsockname()[1]}/"
    server = _Server(config)
    tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(feed.run())]

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the page is not served any more, the autopilot goes on: %s: %s", type(error).__name__, error)
            feed.close()  # a page without news must not look as if it were live
            server.should_exit = True

    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield url
    finally:
        feed.close()
        server.should_exit = True
        await asyncio.wait(tasks[:1])
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
