"""Which caller may call which method: by certificate and by socket, for every method."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.access import ALLOWED, Caller, caller
from snapshotd.api.client import BothStream, DaemonClient, ServerStream, Unary, open_channel, translate
from snapshotd.api.errors import Denied, SnapshotError, Unreachable
from tests.served import Serve, Served, servicer

PUSH = "/snapshotd.v1.Target/Push"


def methods() -> dict[str, Any]:
    """Every method of the .proto, by descriptor."""
    services = pb.DESCRIPTOR.services_by_name.values()
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


def test_the_table_covers_every_method_and_no_other() -> None:
    assert set(ALLOWED) == set(methods()) | {PUSH}


def test_the_table_agrees_with_the_proto() -> None:
    """The comment behind each rpc line names its callers; root may call every method."""
    source = (Path(__file__).parents[2] / "proto" / "snapshotd.proto").read_text()
    said, service = {}, ""
    for line in source.splitlines():
        if found := re.match(r"service (\w+)", line):
            service = found[1]
        if found := re.match(r"\s*(?://)?\s*rpc (\w+)\(.*//\s*(operator|node|operator, node)\s*$", line):
            said[f"/snapshotd.v1.{service}/{found[1]}"] = {*found[2].split(", "), "root"}
    assert said == {method: set(roles) for method, roles in ALLOWED.items()}


async def test_client_has_every_method() -> None:
    client = DaemonClient("unix:/nowhere")
    for path in methods():
        service, method = path.removeprefix("/snapshotd.v1.").split("/")
        assert isinstance(getattr(getattr(client, service.lower()), method), Unary | ServerStream | BothStream), path
    await client.close()


class Everything:
    """Answers every method of every service with its caller, through a generic handler."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def register(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers([self])  # type: ignore[list-item]

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            self.callers.append(caller(context))
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield await one(request, context)

        async def many_by_hand(request: Any, context: Any) -> None:
            await context.write(await one(request, context))

        method = methods().get(details.method)
        if details.method == PUSH:
            return grpc.stream_stream_rpc_method_handler(many_by_hand)
        if details.method == "/snapshotd.v1.Node/Secret":
            return grpc.unary_unary_rpc_method_handler(one)
        if method is None:
            return None
        if method.server_streaming:
            streams = grpc.stream_stream_rpc_method_handler, grpc.unary_stream_rpc_method_handler
            return streams[0 if method.client_streaming else 1](many)
        return grpc.unary_unary_rpc_method_handler(one)


def raw(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary("/snapshotd.v1.Node/GetNode")


async def call(channel: grpc.aio.Channel, path: str) -> None:
    """Calls a method with an empty request. Errors are translated into the taxonomy."""
    try:
        streaming: Any = channel.stream_stream(path)
        replies = [reply async for reply in streaming(iter([b""]))]
        assert replies == [b""]
    except grpc.aio.AioRpcError as error:
        raise translate(error, "node-1", path) from error


@pytest.mark.parametrize("role", ["operator", "node", "root"])
async def test_every_method_allows_exactly_the_roles_of_the_table(serve: Serve, role: str) -> None:
    everything = Everything()
    async with serve(everything.register) as served:
        channel = _channel(served, role)
        expected = {
            "operator": Caller("operator", "alice"),
            "node": Caller("node", "node-2"),
            "root": Caller("root", "root"),
        }[role]
        for path, roles in ALLOWED.items():
            everything.callers.clear()
            if role in roles:
                await call(channel, path)
                assert everything.callers == [expected], path
            else:
                with pytest.raises(Denied, match=f"{expected} may not call {path.rpartition('/')[2]}"):
                    await call(channel, path)
                assert everything.callers == [], path
        await channel.close()


def _channel(served: Served, role: str) -> grpc.aio.Channel:
    if role == "root":
        return open_channel(served.unix, None)
    certificates = served.certificates
    who = certificates.operator if role == "operator" else certificates.other_node
    return open_channel(served.endpoint, who, "node-1")


async def test_method_that_is_not_in_the_table_is_denied(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served:
        for role in ("operator", "node", "root"):
            channel = _channel(served, role)
            with pytest.raises(Denied, match="it is not in the access table"):
                await call(channel, "/snapshotd.v1.Node/Secret")
            await channel.close()
    assert not everything.callers


async def test_node_that_calls_an_operator_method_is_denied(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served, served.by(served.certificates.other_node) as client:
        with pytest.raises(Denied) as got:
            await client.source.Commit(pb.CommitRequest(move="m-000000000000"), timeout_s=5)
    assert got.value.message == "node node-2 may not call Commit: only an operator may"
    assert got.value.exit_code == 17
    assert "migrator pki operator" in got.value.advice


async def test_certificate_of_another_role_is_denied(serve: Serve) -> None:
    async with serve(Everything().register) as served, served.by(served.certificates.wrong_role) as client:
        with pytest.raises(SnapshotError) as got:
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert type(got.value) is Denied, got.value
    assert "belongs neither to an operator nor to a node" in got.value.message


async def test_certificate_of_another_authority_is_refused(serve: Serve) -> None:
    """Neither side trusts the other: the caller's CA has not issued the daemon's certificate either."""
    everything = Everything()
    async with serve(everything.register) as served, served.by(served.certificates.stranger) as client:
        with pytest.raises(Unreachable, match=r"node node-1 at 127\.0\.0\.1:\d+ .*does not accept our certificate"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert not everything.callers


async def test_client_of_another_authority_that_trusts_the_daemon_is_refused(serve: Serve) -> None:
    """The daemon's own check, with a caller that would accept any daemon of our CA."""
    everything = Everything()
    async with serve(everything.register) as served:
        stranger, ours = served.certificates.stranger, served.certificates.operator
        mixed = type(ours)(ca=ours.ca, cert=stranger.cert, key=stranger.key)
        async with served.by(mixed) as client:
            with pytest.raises(Unreachable, match="does not accept our certificate"):
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert not everything.callers


async def test_caller_without_a_certificate_is_refused(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served:
        anonymous = grpc.ssl_channel_credentials(served.certificates.node.ca.read_bytes())
        options = [("grpc.ssl_target_name_override", "node-1")]
        async with grpc.aio.secure_channel(served.endpoint, anonymous, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as got:
                await raw(channel)(b"", timeout=5)
        assert got.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(served.endpoint) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await raw(channel)(b"", timeout=5)
    assert not everything.callers


async def test_certificate_of_another_node_is_not_accepted(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served:
        operator = served.certificates.operator
        async with DaemonClient(served.endpoint, credentials=operator, node="node-9") as client:
            with pytest.raises(Unreachable, match=r"node node-9 at .*certificate"):
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert not everything.callers


async def test_missing_servicer_is_reported_as_unimplemented(serve: Serve) -> None:
    """The generated base class is not a coroutine and raises NotImplementedError."""
    async with serve(servicer("Node")) as served, served.root() as client:
        with pytest.raises(SnapshotError, match="does not know GetNode"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    async with serve(servicer("Source")) as served, served.root() as client:
        with pytest.raises(SnapshotError, match="does not know Stream"):
            [progress async for progress in client.source.Stream(pb.MoveRequest(move="m-1"), timeout_s=5)]
