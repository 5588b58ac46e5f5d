"""A target as the lanes see it: real sockets on loopback with mutual TLS, a store, a meddler between.

Every test that takes `serve` runs twice: over gRPC and over the bulk lane beside it. They keep the same contract.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from migrator import pki
from snapshotd.api.channel import COMMON_OPTIONS, Credentials
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image import bulk_receiver
from snapshotd.transport.image.bulk_receiver import BulkLanes
from snapshotd.transport.image.grpc_channel import push_channels, push_handler
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.tls_connection import Inlet
from tests.transport.image.targets import MOVE, NODE, BulkTarget, GrpcTarget, Meddle, Serve, issue


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    pki.init(folder)
    return folder


@pytest.fixture(scope="session")
def certificates(authority: Path) -> Credentials:
    """One identity for both ends, as node-2."""
    return issue(authority, NODE)


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


@pytest.fixture
def serve_grpc(certificates: Credentials, store: ImageStore) -> Serve:
    @asynccontextmanager
    async def serve(
        streams: int = 2, meddle: Meddle | None = None, deny: Exception | None = None
    ) -> AsyncIterator[GrpcTarget]:
        target = GrpcTarget(store, certificates, streams)

        async def authorise(_context: Any, move: str) -> None:
            target.authorised.append(move)
            if deny is not None:
                raise deny

        interceptors = [_Meddler(meddle)] if meddle is not None else []
        server = grpc.aio.server(options=list(COMMON_OPTIONS), interceptors=interceptors)
        server.add_generic_rpc_handlers((push_handler(store, authorise),))
        port = server.add_secure_port("127.0.0.1:0", certificates.for_server())
        await server.start()
        target.channels = push_channels(f"127.0.0.1:{port}", certificates, NODE, streams)
        try:
            yield target
        finally:
            for channel in target.channels:
                await channel.close()
            await server.stop(None)

    return serve


@pytest.fixture
def serve_bulk(certificates: Credentials, store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> Serve:
    @asynccontextmanager
    async def serve(
        streams: int = 2, meddle: Meddle | None = None, deny: Exception | None = None
    ) -> AsyncIterator[BulkTarget]:
        target = BulkTarget(store, certificates, streams)
        target.lanes = BulkLanes(store, certificates, ["127.0.0.1"])
        admit = bulk_receiver._Lane._admit

        def watched(lane: Any, connection: ssl.SSLSocket, inlet: Inlet) -> None:
            admit(lane, connection, inlet)
            target.authorised.append(MOVE)
            if deny is not None:
                raise deny

        class Meddled(Inlet):
            def read_into(self, view: memoryview) -> None:
                super().read_into(view)
                if meddle is not None:
                    view[:] = meddle(bytes(view))

        monkeypatch.setattr(bulk_receiver._Lane, "_admit", watched)
        monkeypatch.setattr(bulk_receiver, "Inlet", Meddled)
        target.port, target.key = target.lanes.open(MOVE, NODE)
        try:
            yield target
        finally:
            await asyncio.wait_for(in_thread(target.lanes.close_all), 10)

    return serve


@pytest.fixture(params=["grpc", "bulk"])
def serve(request: pytest.FixtureRequest) -> Serve:
    chosen: Serve = request.getfixturevalue(f"serve_{request.param}")
    return chosen
