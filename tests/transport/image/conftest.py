"""A target of the image channel: real sockets on loopback with mutual TLS, a store, and a way to alter messages in between.

Every test that takes `serve` runs twice, over gRPC and over bulk connections, which have the same contract.
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
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.grpc_channel import push_channels, push_handler
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.tls_connection import MessageReader
from tests.transport.image.targets import MOVE, NODE, Alter, BulkTarget, GrpcTarget, Serve, issue


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    pki.init(folder)
    return folder


@pytest.fixture(scope="session")
def certificates(authority: Path) -> Credentials:
    """One identity for both nodes, as node-2."""
    return issue(authority, NODE)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


class _Altered:
    """A servicer's context whose messages were altered in transit."""

    def __init__(self, context: Any, alter: Alter) -> None:
        self._context = context
        self._alter = alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        return self._alter(message) if isinstance(message, bytes) else message


class _Alterer(grpc.aio.ServerInterceptor):
    def __init__(self, alter: Alter) -> None:
        self._alter = alter

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)

        async def behaviour(requests: Any, context: Any) -> None:
            await handler.stream_stream(requests, _Altered(context, self._alter))

        altered: Any = behaviour
        return grpc.stream_stream_rpc_method_handler(altered)


@pytest.fixture
def serve_grpc(certificates: Credentials, store: ImageStore) -> Serve:
    @asynccontextmanager
    async def serve(
        streams: int = 2, alter: Alter | None = None, deny: Exception | None = None
    ) -> AsyncIterator[GrpcTarget]:
        target = GrpcTarget(store, certificates, streams)

        async def authorise(_context: Any, move: str) -> None:
            target.authorised.append(move)
            if deny is not None:
                raise deny

        interceptors = [_Alterer(alter)] if alter is not None else []
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
        streams: int = 2, alter: Alter | None = None, deny: Exception | None = None
    ) -> AsyncIterator[BulkTarget]:
        target = BulkTarget(store, certificates, streams)
        target.receivers = BulkReceivers(store, certificates, ["127.0.0.1"])
        admit = bulk_receiver._BulkReceiver._admit

        def watched(receiver: Any, connection: ssl.SSLSocket, reader: MessageReader) -> None:
            admit(receiver, connection, reader)
            target.authorised.append(MOVE)
            if deny is not None:
                raise deny

        class Altered(MessageReader):
            def read_into(self, view: memoryview) -> None:
                super().read_into(view)
                if alter is not None:
                    view[:] = alter(bytes(view))

        monkeypatch.setattr(bulk_receiver._BulkReceiver, "_admit", watched)
        monkeypatch.setattr(bulk_receiver, "MessageReader", Altered)
        target.port, target.key = target.receivers.open(MOVE, NODE)
        try:
            yield target
        finally:
            await asyncio.wait_for(in_thread(target.receivers.close_all), 10)

    return serve


@pytest.fixture(params=["grpc", "bulk"])
def serve(request: pytest.FixtureRequest) -> Serve:
    chosen: Serve = request.getfixturevalue(f"serve_{request.param}")
    return chosen
