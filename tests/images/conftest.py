"""A target as the lane sees it: a real grpc.aio server on loopback with mutual TLS, a store, a meddler between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from migrator import pki
from snapshotd.api.channel import COMMON_OPTIONS, Credentials
from snapshotd.images.lane import push_channels, push_handler
from snapshotd.images.store import ImageStore

MOVE = "m-0123456789ab"
Meddle = Callable[[bytes], bytes]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """One identity for both ends, as node-2."""
    folder = tmp_path_factory.mktemp("ca")
    pki.init(folder)
    identity = pki.issue_node(folder, "node-2")
    return Credentials(identity.ca, identity.cert, identity.key)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


class _Meddled:
    """A servicer's context whose messages somebody changed on the way."""

    def __init__(self, context: Any, meddle: Meddle) -> None:
        self._context = context
        self._meddle = meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        return self._meddle(message) if isinstance(message, bytes) else message


class _Meddler(grpc.aio.ServerInterceptor):
    def __init__(self, meddle: Meddle) -> None:
        self._meddle = meddle

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)

        async def behaviour(requests: Any, context: Any) -> None:
            await handler.stream_stream(requests, _Meddled(context, self._meddle))

        meddled: Any = behaviour
        return grpc.stream_stream_rpc_method_handler(meddled)


@dataclass(frozen=True)
class Target:
    """A running target, and how many streams were opened to it."""

    endpoint: str
    store: ImageStore
    channels: list[grpc.aio.Channel]
    server: grpc.aio.Server
    authorised: list[str]


Serve = Callable[..., AbstractAsyncContextManager[Target]]


@pytest.fixture
def serve(certificates: Credentials, store: ImageStore) -> Serve:
    @asynccontextmanager
    async def serve(
        streams: int = 2, meddle: Meddle | None = None, deny: Exception | None = None
    ) -> AsyncIterator[Target]:
        authorised: list[str] = []

        async def authorise(_context: Any, move: str) -> None:
            authorised.append(move)
            if deny is not None:
                raise deny

        interceptors = [_Meddler(meddle)] if meddle is not None else []
        server = grpc.aio.server(options=list(COMMON_OPTIONS), interceptors=interceptors)
        server.add_generic_rpc_handlers((push_handler(store, authorise),))
        port = server.add_secure_port("127.0.0.1:0", certificates.for_server())
        await server.start()
        endpoint = f"127.0.0.1:{port}"
        channels = push_channels(endpoint, certificates, "node-2", streams)
        try:
            yield Target(endpoint, store, channels, server, authorised)
        finally:
            for channel in channels:
                await channel.close()
            await server.stop(None)

    return serve
