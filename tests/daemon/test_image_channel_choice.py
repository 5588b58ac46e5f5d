"""The choice of the image channel: bulk connections, or gRPC if those cannot be opened."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Denied, Internal, SnapshotError, Unreachable, Where
from snapshotd.moves.record import Begin
from snapshotd.moves.source.channel import streams_to_target
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.bulk_sender import BulkStream
from snapshotd.transport.image.grpc_channel import PushCall
from snapshotd.transport.image.store import ImageStore

MOVE = "m-0123456789ab"
BEGIN: Any = SimpleNamespace(move=MOVE, target_node="node-2", target_endpoint="127.0.0.1:7070")


@dataclass
class SourceNode:
    """A node whose target answers OpenImageChannel with `answer`, or raises it."""

    config: Any
    answer: pb.OpenImageChannelReply | SnapshotError

    def connect(self, name: str, endpoint: str) -> GrpcChannel:
        assert (name, endpoint) == (BEGIN.target_node, BEGIN.target_endpoint)
        return GrpcChannel(open_channel(endpoint, self.config.credentials, name))

    @asynccontextmanager
    async def client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        assert (name, endpoint) == (BEGIN.target_node, BEGIN.target_endpoint)

        async def open_image_channel(request: pb.OpenImageChannelRequest, timeout_s: float) -> pb.OpenImageChannelReply:
            assert (request.move, request.sealed) == (MOVE, True)
            if isinstance(self.answer, SnapshotError):
                raise self.answer
            return self.answer

        yield SimpleNamespace(target=SimpleNamespace(OpenImageChannel=open_image_channel))


@pytest.fixture
def config(tmp_path: Path) -> Any:
    pki.init(tmp_path / "ca")
    identity = pki.issue_node(tmp_path / "ca", "node-2")
    return SimpleNamespace(
        credentials=Credentials(identity.ca, identity.cert, identity.key), streams=3, data_addresses=()
    )


async def kinds(node: Any, begin: Begin = BEGIN) -> list[type]:
    async with streams_to_target(node, begin) as streams:
        for stream in streams:
            stream.cancel()
            await stream.ended()
        return [type(stream) for stream in streams]


async def test_bulk_connections_are_preferred(config: Any, tmp_path: Path) -> None:
    receivers = BulkReceivers(ImageStore(tmp_path / "images"), config.credentials, ["127.0.0.1"])
    port, key, _ = receivers.open(MOVE, "node-2")
    assert (
        await kinds(SourceNode(config, pb.OpenImageChannelReply(port=port, key=key, sealed=True))) == [BulkStream] * 3
    )
    receivers.close_all()


async def test_connections_are_spread_over_the_addresses_for_data(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one answers nobody: its connection goes by another route, and the move does not fail."""
    config.data_addresses = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
    there = ["127.0.0.2", "127.0.0.3"]
    receivers = BulkReceivers(ImageStore(tmp_path / "images"), config.credentials, ["192.0.2.1"], there)
    port, key, endpoints = receivers.open(MOVE, "node-2")
    with socket.socket() as dead:
        dead.bind(("127.0.0.4", 0))  # and does not listen
        endpoints = [*endpoints, f"127.0.0.4:{dead.getsockname()[1]}"]
        reply = pb.OpenImageChannelReply(port=port, key=key, sealed=True, endpoints=endpoints)
        async with streams_to_target(SourceNode(config, reply), BEGIN) as streams:  # type: ignore[arg-type]
            ends = [one._connection._socket for one in streams if isinstance(one, BulkStream)]
            used = [(end.getsockname()[0], end.getpeername()[0]) for end in ends]
            for stream in streams:
                stream.cancel()
                await stream.ended()
    assert used == [("127.0.0.11", "127.0.0.2"), ("127.0.0.12", "127.0.0.3"), ("127.0.0.11", "127.0.0.2")]
    assert "no connection for images to node-2 at 127.0.0.4" in caplog.text
    receivers.close_all()


async def test_nonsense_instead_of_addresses_falls_back_to_grpc(config: Any) -> None:
    reply = pb.OpenImageChannelReply(port=1, key=b"k", sealed=True, endpoints=["nowhere"])
    assert await kinds(SourceNode(config, reply)) == [PushCall] * 3


async def test_closed_port_falls_back_to_grpc_and_logs_one_line(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with caplog.at_level(logging.INFO, logger="snapshotd.moves.source.channel"):
        assert (
            await kinds(SourceNode(config, pb.OpenImageChannelReply(port=port, key=b"k", sealed=True)))
            == [PushCall] * 3
        )
    (line,) = caplog.messages
    assert "gRPC carries the images: the bulk connection cannot be established" in line
    assert "refused" in line


async def test_target_without_bulk_connections_uses_grpc(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="snapshotd.moves.source.channel"):
        assert await kinds(SourceNode(config, Internal("it does not know OpenImageChannel"))) == [PushCall] * 3
    assert len(caplog.messages) == 1


async def test_target_of_an_older_version_gets_the_images_over_grpc(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens a port for connections that stay in TLS, and does not say that it knows others."""
    with caplog.at_level(logging.INFO, logger="snapshotd.moves.source.channel"):
        assert await kinds(SourceNode(config, pb.OpenImageChannelReply(port=1, key=b"k"))) == [PushCall] * 3
    (line,) = caplog.messages
    assert "its version of snapshotd is older" in line


async def test_refused_connection_is_not_a_reason_to_use_grpc(config: Any, tmp_path: Path) -> None:
    receivers = BulkReceivers(ImageStore(tmp_path / "images"), config.credentials, ["127.0.0.1"])
    port, _, _ = receivers.open(MOVE, "node-2")
    with pytest.raises(Denied, match="not the key") as found:
        await kinds(SourceNode(config, pb.OpenImageChannelReply(port=port, key=b"k" * 32, sealed=True)))
    assert found.value.where is Where.SOURCE_FROZEN
    receivers.close_all()


@pytest.mark.parametrize("error", [Denied("you are not the source"), Unreachable("it is gone")])
async def test_refusal_of_the_move_by_the_target_is_raised(config: Any, error: SnapshotError) -> None:
    with pytest.raises(type(error)) as found:
        await kinds(SourceNode(config, error))
    assert found.value.where is Where.SOURCE_FROZEN
