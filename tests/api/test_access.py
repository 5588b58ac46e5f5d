"""Which caller may call which method: by certificate and by socket, for every method."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import get_args, get_type_hints

import grpc
import grpc.aio
import pytest

from snapshotd.api import servicers
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.access import ALLOWED, Caller, check
from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.client import BothStream, DaemonClient, ServerStream, Unary, UnknownMethod, translate
from snapshotd.api.errors import Denied, SnapshotError, Unreachable
from snapshotd.api.methods import PUSH, methods
from snapshotd.network.dispatch import Context, Services
from tests.served import Serve, Served, servicer


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


async def test_client_has_every_method_with_its_types() -> None:
    client = DaemonClient("unix:/nowhere")
    kinds = {(False, False): Unary, (False, True): ServerStream, (True, True): BothStream}
    for path, method in methods().items():
        service, name = path.removeprefix("/snapshotd.v1.").split("/")
        found = getattr(getattr(client, service.lower()), name)
        assert type(found) is kinds[method.request_streaming, method.reply_streaming], path
        assert (found.path, found.request, found.reply) == (path, method.request, method.reply)
    await client.close()


def test_servicers_have_every_method_with_its_types() -> None:
    for path, method in methods().items():
        service, name = path.removeprefix("/snapshotd.v1.").split("/")
        servicer_class = getattr(servicers, f"{service}Servicer")
        hints = get_type_hints(getattr(servicer_class, name))
        taken, returned = (hint for key, hint in hints.items() if key != "context")
        assert (taken if not method.request_streaming else get_args(taken)[0]) is method.request, path
        assert (returned if not method.reply_streaming else get_args(returned)[0]) is method.reply, path


class Everything:
    """Answers every method of every service, and remembers its caller."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def register(self, services: Services) -> None:
        async def plain(context: Context) -> None:
            self.callers.append(context.caller)
            await context.write(b"")

        for path in (*methods(), PUSH, "/snapshotd.v1.Node/Secret"):
            services.add_plain(path, plain)


def raw(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary("/snapshotd.v1.Node/GetNode")


async def call(channel: grpc.aio.Channel, path: str) -> None:
    """Calls a method with an empty request. Errors are translated into the taxonomy."""
    stream = GrpcChannel(channel).stream(path)
    try:
        with contextlib.suppress(CallEnded):  # then reading says why
            await stream.write(b"")
            await stream.done_writing()
        assert await stream.read() == b""
        assert await stream.read() is None
    except CallFailed as failed:
        raise translate(failed, "node-1", path) from failed


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


async def test_method_that_is_not_in_the_table_cannot_be_called(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served:
        for role in ("operator", "node", "root"):
            channel = _channel(served, role)
            with pytest.raises(UnknownMethod, match=r"does not know .*Secret"):
                await call(channel, "/snapshotd.v1.Node/Secret")
            await channel.close()
    assert not everything.callers
    # The daemon does not rely on the network process for this.
    with pytest.raises(Denied, match="it is not in the access table"):
        check("/snapshotd.v1.Node/Secret", Caller("root", "root"))


async def test_node_that_calls_an_operator_method_is_denied(serve: Serve) -> None:
    everything = Everything()
    async with serve(everything.register) as served, served.by(served.certificates.other_node) as client:
        with pytest.raises(Denied) as got:
            await client.source.Commit(pb.CommitRequest(move="m-000000000000"), timeout_s=5)
    assert got.value.message == "node node-2 may not call Commit: only an operator may"
    assert got.value.exit_code == 17
    assert "migrator pki operator" in got.value.advice


@pytest.mark.parametrize(
    "method", ["Begin", "Detach", "Attach", "Commit", "Abort", "Drop", "Rollback", "HandOver", "Adopt", "Succeed"]
)
def test_only_operators_decide_about_jobs(method: str) -> None:
    """Snapshots and rollbacks are on by default."""
    check(f"/snapshotd.v1.Job/{method}", Caller("operator", "alice"))
    with pytest.raises(Denied, match="only an operator may"):
        check(f"/snapshotd.v1.Job/{method}", Caller("node", "node-2"))


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
                await raw(channel)(b"", timeout=60)
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
    async with serve(servicer("Node")) as served, served.root() as client:
        with pytest.raises(SnapshotError, match="does not know GetNode"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    async with serve(servicer("Source")) as served, served.root() as client:
        with pytest.raises(SnapshotError, match="does not know Stream"):
            [progress async for progress in client.source.Stream(pb.MoveRequest(move="m-1"), timeout_s=5)]
