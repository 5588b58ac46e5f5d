"""A target of the image channel: real sockets on loopback with mutual TLS, a store, and a way to alter messages in between.

Every test that takes `serve` runs twice, over gRPC and over bulk connections, which have the same contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from migrator import pki
from snapshotd.api.credentials import Credentials
from snapshotd.api.methods import PUSH
from snapshotd.network.dispatch import Context, Services
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image import bulk_receiver
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.grpc_channel import push_handler
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.sealed import Connection, SealedConnection
from tests.served import Linked
from tests.transport.image.targets import MOVE, NODE, Alter, BulkTarget, GrpcTarget, Serve, issue

LENGTH_BYTES = 4  # of the message that precedes every other one


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

        push = push_handler(store, authorise)

        async def altered(context: Context) -> None:
            await push(cast("Context", _Altered(context, alter)) if alter is not None else context)

        services = Services()
        services.add_plain(PUSH, altered)
        ends = Linked(services, certificates)
        async with ends.listening("127.0.0.1:0") as port:
            target.endpoint = f"127.0.0.1:{port}"
            target.channels = [ends.connect(NODE, target.endpoint) for _ in range(streams)]
            yield target
            for channel in target.channels:
                await channel.close()

    return serve


@pytest.fixture
def serve_bulk(certificates: Credentials, store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> Serve:
    @asynccontextmanager
    async def serve(
        streams: int = 2, alter: Alter | None = None, deny: Exception | None = None
    ) -> AsyncIterator[BulkTarget]:
        target = BulkTarget(store, certificates, streams)
        target.receivers = BulkReceivers(store, certificates, ["127.0.0.1"])
        receive = bulk_receiver._BulkReceiver._receive

        def watched(receiver: Any, connection: Connection) -> None:
            target.authorised.append(MOVE)
            if deny is not None:
                raise deny
            receive(receiver, connection)

        class Altered(SealedConnection):
            def read_into(self, view: memoryview) -> None:
                super().read_into(view)
                if alter is not None and len(view) != LENGTH_BYTES:
                    view[:] = alter(bytes(view))

        monkeypatch.setattr(bulk_receiver._BulkReceiver, "_receive", watched)
        monkeypatch.setattr(bulk_receiver, "SealedConnection", Altered)
        target.port, target.key, _ = target.receivers.open(MOVE, NODE)
        try:
            yield target
        finally:
            await asyncio.wait_for(in_thread(target.receivers.close_all), 60)

    return serve


@pytest.fixture(params=["grpc", "bulk"])
def serve(request: pytest.FixtureRequest) -> Serve:
    chosen: Serve = request.getfixturevalue(f"serve_{request.param}")
    return chosen
