"""Every error class arrives over a real connection as the same class, and gRPC's errors are translated."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from snapshotd.api import errors
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import MAX_MESSAGE_BYTES, CallFailed
from snapshotd.api.channel import _failed, open_channel
from snapshotd.api.client import DaemonClient, UnknownMethod, translate
from snapshotd.api.errors import (
    BY_CODE,
    Damaged,
    Full,
    Internal,
    RankGone,
    SnapshotError,
    Timeout,
    Unreachable,
    Where,
    WrongState,
)
from snapshotd.network.dispatch import Context, Services
from tests.served import Certificates, Register, Serve, serve_in, servicer

T = TypeVar("T")
MOVE = pb.MoveRequest(move="m-000000000000")


@pytest.fixture(params=["client", "daemon"])
def serve(request: pytest.FixtureRequest, tmp_path: Path, certificates: Certificates) -> Serve:
    """Calls over a connection, and as a daemon makes them: through the link to its network process."""
    return serve_in(tmp_path, certificates, linked=request.param == "daemon")


def failing(error: BaseException) -> Register:
    """Methods of every kind, each of which raises `error`."""

    async def freeze(request: pb.MoveRequest, context: Any) -> pb.FreezeReply:
        raise error

    async def stream(request: pb.MoveRequest, context: Any) -> AsyncIterator[pb.Progress]:
        yield pb.Progress(bytes_sent=7)
        raise error

    return servicer("Source", Freeze=freeze, Stream=stream)


async def every(replies: AsyncIterator[T], into: list[T]) -> None:
    async for reply in replies:
        into.append(reply)  # noqa: PERF401 - what came before an error must be kept


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_every_error_class_arrives_as_the_same_class(serve: Serve, code: str) -> None:
    sent = BY_CODE[code]("what happened – naïve text", remedy="what to do", where=Where.SOURCE_FROZEN)
    async with serve(failing(sent)) as served, served.root() as client:
        with pytest.raises(SnapshotError) as unary:
            await client.source.Freeze(MOVE, timeout_s=5)
        with pytest.raises(SnapshotError) as streamed:
            await every(client.source.Stream(MOVE, timeout_s=5), [])
    for got in (unary.value, streamed.value):
        assert type(got) is BY_CODE[code]
        assert (got.message, got.advice, got.where) == (sent.message, sent.advice, sent.where)


async def test_error_says_of_which_node_it_is_also_through_another_one(serve: Serve) -> None:
    own, passed_on = Timeout("its disk does not answer"), Timeout("the disk of node-9 does not answer")
    passed_on.of_node = "node-9"
    for sent, node in ((own, "node-1"), (passed_on, "node-9")):
        async with serve(failing(sent)) as served, served.operator() as client:
            with pytest.raises(Timeout) as got:
                await client.source.Freeze(MOVE, timeout_s=5)
        assert got.value.of_node == node
    unreached = Unreachable("nothing was answered")
    assert unreached.of_node == ""
    assert errors.from_wire(unreached.to_wire()).of_node == ""


async def test_default_remedy_of_a_class_arrives(serve: Serve) -> None:
    async with serve(failing(RankGone("it ended"))) as served, served.root() as client:
        with pytest.raises(RankGone) as got:
            await client.source.Freeze(MOVE, timeout_s=5)
    assert got.value.advice == RankGone.remedy


async def test_stream_delivers_messages_that_precede_an_error(serve: Serve) -> None:
    async with serve(failing(WrongState("no"))) as served, served.root() as client:
        seen: list[pb.Progress] = []
        with pytest.raises(WrongState):
            await every(client.source.Stream(MOVE, timeout_s=5), seen)
    assert [progress.bytes_sent for progress in seen] == [7]


async def test_unexpected_exception_is_internal_and_its_traceback_is_only_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(failing(ZeroDivisionError("secret place"))) as served, served.root() as client:
        with caplog.at_level(logging.ERROR), pytest.raises(Internal, match="Freeze failed unexpectedly") as got:
            await client.source.Freeze(MOVE, timeout_s=5)
    assert "Traceback" not in got.value.message
    assert "Traceback" in caplog.text
    assert "test_errors_on_the_wire.py" in caplog.text


async def test_long_message_arrives_shortened(serve: Serve) -> None:
    """gRPC's default limit on metadata would otherwise break the connection."""
    sent = errors.CriuFailed("begin " + "ä€𝄞\n" * 100_000 + " end", where=Where.SOURCE_RUNNING)
    async with serve(failing(sent)) as served, served.operator() as client:
        with pytest.raises(errors.CriuFailed) as got:
            await client.source.Freeze(MOVE, timeout_s=5)
    assert got.value.message.startswith("begin ")
    assert got.value.message.endswith(" end")
    assert "characters left out" in got.value.message
    assert got.value.where is Where.SOURCE_RUNNING


async def test_method_that_the_server_lacks_is_reported(serve: Serve) -> None:
    async with serve(failing(WrongState("no"))) as served, served.root() as client:
        with pytest.raises(UnknownMethod, match="does not know Renew") as got:
            await client.source.Renew(MOVE, timeout_s=5)
        with pytest.raises(UnknownMethod, match="does not know GetNode"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert "same version" in got.value.advice


async def unfinished_reply(request: pb.MoveRequest, context: Any) -> pb.PrepareDeviceReply:
    raise NotImplementedError("no offload on this architecture")


async def unfinished_replies(request: pb.MoveRequest, context: Any) -> AsyncIterator[pb.Progress]:
    yield pb.Progress()
    raise NotImplementedError("no offload on this architecture")


async def test_not_implemented_error_of_a_handler_is_an_internal_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver continues without a method that the daemon does not know; it must not do so if the method failed."""
    register = servicer("Source", PrepareDevice=unfinished_reply, Stream=unfinished_replies)
    async with serve(register) as served, served.root() as client:
        with pytest.raises(errors.Internal, match="no offload on this architecture") as got:
            await client.source.PrepareDevice(MOVE, timeout_s=5)
        assert not isinstance(got.value, UnknownMethod)
        with pytest.raises(errors.Internal, match="no offload on this architecture") as streamed:
            [progress async for progress in client.source.Stream(MOVE, timeout_s=5)]
        assert not isinstance(streamed.value, UnknownMethod)
    assert caplog.text.count("NotImplementedError: no offload on this architecture") == 2


class Slow:
    """A servicer that never returns."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        self.register = servicer("Source", Freeze=self.freeze, Stream=self.stream)

    async def freeze(self, request: pb.MoveRequest, context: Any) -> pb.FreezeReply:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    async def stream(self, request: pb.MoveRequest, context: Any) -> AsyncIterator[pb.Progress]:
        try:
            while True:
                yield pb.Progress(bytes_sent=1)
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()


async def test_deadline_raises_timeout_and_cancels_the_servicer(serve: Serve) -> None:
    slow = Slow()
    async with serve(slow.register) as served, served.root() as client:
        with pytest.raises(Timeout, match="did not answer Freeze in time"):
            await client.source.Freeze(MOVE, timeout_s=0.2)
        await asyncio.wait_for(slow.cancelled.wait(), 60)


async def test_cancelled_call_is_not_logged_as_an_error(serve: Serve) -> None:
    slow = Slow()
    async with serve(slow.register) as served, served.root() as client:
        task = asyncio.create_task(client.source.Freeze(MOVE, timeout_s=30))
        await asyncio.wait_for(slow.entered.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(slow.cancelled.wait(), 60)


async def test_leaving_a_stream_early_ends_it_on_the_server(serve: Serve) -> None:
    slow = Slow()
    async with serve(slow.register) as served, served.root() as client:
        replies = client.source.Stream(MOVE, timeout_s=30)
        async for _ in replies:
            break
        await replies.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(slow.cancelled.wait(), 60)


async def test_server_that_stops_during_a_call_is_unreachable(serve: Serve) -> None:
    slow = Slow()
    async with serve(slow.register) as served:
        client = served.root()
        task = asyncio.create_task(client.source.Freeze(MOVE, timeout_s=30))
        await asyncio.wait_for(slow.entered.wait(), 60)
    with pytest.raises(Unreachable):
        await task
    await client.close()


async def test_unreachable_daemon_is_reported_for_every_kind_of_call(tmp_path: Path, free_port: int) -> None:
    async with DaemonClient(f"unix:{tmp_path}/none.sock") as client:
        with pytest.raises(Unreachable, match=f"daemon at unix:{tmp_path}/none.sock could not be reached"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)


async def test_refused_connection_names_node_and_endpoint(serve: Serve, free_port: int, certificates: Any) -> None:
    client = DaemonClient(f"127.0.0.1:{free_port}", credentials=certificates.operator, node="node-7")
    async with client:
        with pytest.raises(Unreachable) as got:
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
    assert got.value.message == f"node node-7 at 127.0.0.1:{free_port} could not be reached: connection refused"


async def test_retry_waits_for_a_daemon_that_starts(serve: Serve, tmp_path: Path) -> None:
    async def get_node(request: pb.GetNodeRequest, context: Any) -> pb.NodeInfo:
        return pb.NodeInfo(name="node-1")

    async with DaemonClient(f"unix:{tmp_path}/admin.sock") as client:
        with pytest.raises(Unreachable):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
        asking = asyncio.create_task(client.node.GetNode(pb.GetNodeRequest(), timeout_s=20, retry=True))
        async with serve(servicer("Node", GetNode=get_node)):
            assert (await asking).name == "node-1"


async def test_retry_is_bounded_and_ends_with_the_reason(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with DaemonClient(f"unix:{tmp_path}/none.sock") as client:
        began_s = loop.time()
        with pytest.raises(Unreachable, match="could not be reached"):
            await client.node.GetNode(pb.GetNodeRequest(), timeout_s=1, retry=True)
        assert 0.8 < loop.time() - began_s < 4


async def test_retry_does_not_repeat_an_answer(serve: Serve) -> None:
    asked = []

    async def freeze(request: pb.MoveRequest, context: Any) -> pb.FreezeReply:
        asked.append(request.move)
        raise WrongState("no")

    async with serve(servicer("Source", Freeze=freeze)) as served, served.root() as client:
        with pytest.raises(WrongState):
            await client.source.Freeze(MOVE, timeout_s=5, retry=True)
    assert asked == [MOVE.move]


async def test_oversized_message_is_refused_with_a_reason(serve: Serve) -> None:
    async def examine(request: pb.ExamineRequest, context: Any) -> pb.ExamineReply:
        return pb.ExamineReply(checks=[pb.Check(reason="x" * (MAX_MESSAGE_BYTES + 1))])

    huge = pb.ExamineRequest(facts=pb.RankFacts(directories=["x" * (MAX_MESSAGE_BYTES + 1)]))
    async with serve(servicer("Target", Examine=examine)) as served, served.operator() as client:
        with pytest.raises(Damaged, match=r"a message of Examine.*larger than any may be"):
            await client.target.Examine(huge, timeout_s=10)
        with pytest.raises(Damaged, match=r"a message of Examine.*larger than any may be"):
            await client.target.Examine(pb.ExamineRequest(), timeout_s=10)
        # A peer that does not limit itself is refused by the daemon.
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(served.unix, options=unlimited) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/snapshotd.v1.Target/Examine")
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
                await call(huge.SerializeToString())


async def test_malformed_request_is_damaged(serve: Serve) -> None:
    async with serve(failing(WrongState("no"))) as served, open_channel(served.unix, None) as channel:
        for method in ("Freeze", "Stream"):
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            call = channel.unary_stream(f"/snapshotd.v1.Source/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as raw:
                await every(aiter(call(b"\xff\xff\xff")), [])
            assert type(translate(_failed(raw.value), "node-1", method)) is Damaged


async def test_malformed_message_in_a_stream_is_damaged(serve: Serve) -> None:
    async def relay(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        async for frame in frames:
            yield frame

    async with serve(servicer("Home", Relay=relay)) as served, open_channel(served.unix, None) as channel:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        call = channel.stream_stream("/snapshotd.v1.Home/Relay")
        with pytest.raises(grpc.aio.AioRpcError) as raw:
            await every(aiter(call(iter([b"\xff\xff\xff"]))), [])
    assert type(translate(_failed(raw.value), "node-1", "Relay")) is Damaged


async def test_malformed_answer_is_damaged(serve: Serve) -> None:
    """From another version, or another program."""

    async def garbage(context: Context) -> None:
        await context.write(b"\xff\xff\xff")

    def register(services: Services) -> None:
        services.add_plain("/snapshotd.v1.Source/Freeze", garbage)

    async with serve(register) as served, served.root() as client:
        with pytest.raises(Damaged, match="not an answer to it"):
            await client.source.Freeze(MOVE, timeout_s=5)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("UNAUTHENTICATED", errors.Denied),
        ("PERMISSION_DENIED", errors.Denied),
        ("RESOURCE_EXHAUSTED", Full),
        ("UNKNOWN", Internal),
        ("CANCELLED", Unreachable),
    ],
)
async def test_grpc_status_without_wire_form_is_translated(
    serve: Serve, status: str, expected: type[SnapshotError]
) -> None:
    async def freeze(request: pb.MoveRequest, context: Any) -> pb.FreezeReply:
        raise CallFailed(status, "bare")

    async with serve(servicer("Source", Freeze=freeze)) as served, served.root() as client:
        with pytest.raises(expected, match="bare"):
            await client.source.Freeze(MOVE, timeout_s=5)


async def test_relay_works_in_both_directions_with_metadata(serve: Serve) -> None:
    async def relay(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        who = context.metadata["rank-uid"]
        async for frame in frames:
            yield pb.RelayFrame(frame=f"{who}:".encode() + frame.frame)
        raise WrongState("the keeper is gone")

    async def frames() -> AsyncGenerator[pb.RelayFrame, None]:
        yield pb.RelayFrame(frame=b"one")
        yield pb.RelayFrame(frame=b"two")

    async def broken() -> AsyncGenerator[pb.RelayFrame, None]:
        yield pb.RelayFrame(frame=b"one")
        raise RankGone("the rank ended")

    async with serve(servicer("Home", Relay=relay)) as served, served.by(served.certificates.other_node) as client:
        got: list[pb.RelayFrame] = []
        with pytest.raises(WrongState, match="the keeper is gone"):
            await every(client.home.Relay(frames(), metadata={"rank-uid": "job-0-ab"}), got)
        assert [frame.frame for frame in got] == [b"job-0-ab:one", b"job-0-ab:two"]
        with pytest.raises(RankGone):
            await every(client.home.Relay(broken(), metadata={"rank-uid": "job-0-ab"}), [])


def test_exit_codes_are_unique_and_each_is_explained() -> None:
    """No two codes share a number, and none is used by shells."""
    codes = [cls.exit_code for cls in BY_CODE.values()]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 64 for code in codes), "64–78 are sysexits', 125 and above the shell's and the keeper's"
    for cls in BY_CODE.values():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.code)
        assert cls.remedy
        assert grpc.StatusCode[cls.status] is not grpc.StatusCode.OK


def test_every_exit_code_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    text = page.read_text(encoding="utf-8")
    missing = [cls.code for cls in BY_CODE.values() if not re.search(rf"\b{cls.exit_code}\b.*\b{cls.code}\b", text)]
    assert not missing, f"not in {page.name}: {missing}"


def test_malformed_wire_form_is_internal() -> None:
    for blob in (b"", b"[]", b"\xff", b'{"code": "refused"}', b'{"code":"x","message":"m","remedy":"","where":"moon"}'):
        assert type(errors.from_wire(blob)) is Internal
