"""The image channel against a sender that violates the protocol: one clear error each, and the next stream works."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Busy, Damaged, Denied, SnapshotError, from_wire
from snapshotd.api.methods import PUSH
from snapshotd.network.dispatch import Context, Services
from snapshotd.transport.image import grpc_channel
from snapshotd.transport.image.frame import MAX_CHUNK_BYTES, Answer, Frame, Kind, data_frame, hole_frame
from snapshotd.transport.image.grpc_channel import MOVE_KEY, PushCall
from tests.served import Linked
from tests.transport.image.targets import MOVE, NODE, GrpcTarget, Serve, hang_up


def error_of(answer: Answer) -> SnapshotError:
    assert answer.kind is Kind.ERROR
    return from_wire(answer.text)


def unsafe(frame: Frame) -> bytes:
    frame.digest = bytes(16)
    return frame.header()


GOOD = data_frame(1, "a.img", 0, b"good", strong=True)
CASES = {
    "truncated header": ([b"SNPI"], "truncated frame"),
    "empty message": ([b""], "truncated frame"),
    "rubbish": ([random.Random(1).randbytes(500)], "not a frame"),
    "payload cut short": ([GOOD.header(), b"goo"], "has 3 bytes instead of 4"),
    "payload too long": ([GOOD.header(), b"good!"], "has 5 bytes instead of 4"),
    "no payload": ([GOOD.header()], "ended before the payload"),
    "path in a name": (
        [hole_frame(1, "../../etc/passwd", 0, 1, strong=True).header()],
        "not the name of an image file",
    ),
    "absurd chunk": ([unsafe(Frame(Kind.DATA, 1, "a", 0, 1 << 39, payload_bytes=1 << 31))], "at most"),
    "absurd offset": ([unsafe(Frame(Kind.HOLE, 1, "a", 1 << 63, 1))], "beyond"),
    "an answer instead of a chunk": ([Answer(Kind.OK, 1).message()], "truncated frame"),
}


@pytest.mark.parametrize("case", CASES)
async def test_malformed_frame_is_damaged_and_earlier_chunks_are_answered(serve: Serve, case: str) -> None:
    messages, text = CASES[case]
    first = data_frame(7, "first.img", 0, b"1", strong=True)
    async with serve(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        taken = await target.answers(first.header(), b"1", *messages)
        assert taken[0] == Answer(Kind.OK, 7)
        error = error_of(taken[1])
        assert isinstance(error, Damaged)
        assert text in error.message
        assert len(taken) == 2
        assert [path.name for path in target.store.path(MOVE).iterdir()] == ["first.img"]
        assert await target.answers(GOOD.header(), b"good") == [Answer(Kind.OK, 1)]


async def test_random_message_gets_at_most_one_error(serve: Serve) -> None:
    dice = random.Random(2)
    async with serve(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        for _ in range(60):
            message = bytearray(GOOD.header() + bytes(dice.choice((0, 0, 3))))
            for _ in range(dice.randint(1, 4)):
                message[dice.randrange(len(message))] = dice.randrange(256)
            for answer in await target.answers(bytes(message), b"good"):
                assert answer.kind in (Kind.OK, Kind.BAD) or isinstance(error_of(answer), Damaged)


async def test_chunk_with_wrong_digest_is_requested_again(serve: Serve) -> None:
    async with serve(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        taken = await target.answers(GOOD.header(), b"goad", GOOD.header(), b"good")
        assert taken == [Answer(Kind.BAD, 1), Answer(Kind.OK, 1)]


async def test_chunk_over_grpc_needs_a_cryptographic_digest(serve_grpc: Serve) -> None:
    """The target's network process could find another chunk with the same fast digest, and pass that on instead."""
    weak = data_frame(1, "a.img", 0, b"good")
    async with serve_grpc(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        (answer,) = await target.answers(weak.header(), b"good")
        assert "weak digest" in error_of(answer).message
        assert list(target.store.path(MOVE).iterdir()) == []


async def test_oversized_message_ends_only_its_stream(serve: Serve) -> None:
    huge = data_frame(1, "a.img", 0, b"x" * MAX_CHUNK_BYTES, strong=True)
    async with serve(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        stream = await target.stream()
        assert await stream.send(huge)
        assert await stream.receive() == Answer(Kind.OK, 1)
        huge.payload = bytes(15 << 20)  # gRPC accepts it, the channel does not
        await stream.send(huge)
        answer = await stream.receive()
        assert answer is not None
        assert "instead of" in error_of(answer).message
        await stream.done()
        assert await stream.receive() is None
        await hang_up(stream)
        assert await target.answers(GOOD.header(), b"good") == [Answer(Kind.ERROR, 0, taken_twice())]


def taken_twice() -> bytes:
    return Damaged(f"a.img of {MOVE}: two different chunks at 0").to_wire()


@pytest.mark.parametrize(
    "metadata", [(), ((MOVE_KEY, "../x"),), ((MOVE_KEY, MOVE), (MOVE_KEY, MOVE)), ((MOVE_KEY, "m-1"),)]
)
async def test_stream_must_name_its_move(serve_grpc: Serve, metadata: Sequence[tuple[str, str]]) -> None:
    async with serve_grpc(streams=1) as target:
        assert isinstance(target, GrpcTarget)
        (answer,) = await target.answers_for(metadata)
        assert isinstance(error_of(answer), Denied)
        assert target.authorised == []


async def test_unauthorised_peer_writes_nothing(serve: Serve) -> None:
    async with serve(streams=1, deny=Denied("this node is not the source of the move")) as target:
        target.store.create(MOVE, 1 << 20)
        (answer,) = await target.answers(GOOD.header(), b"good")
        assert error_of(answer).message == "this node is not the source of the move"
        assert list(target.store.path(MOVE).iterdir()) == []


async def test_streams_of_a_move_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_channel, "MAX_STREAMS_PER_MOVE", 1)
    async with serve(streams=1) as target:
        target.store.create(MOVE, 1 << 20)
        first = await target.stream()
        assert await first.send(GOOD)
        assert await first.receive() == Answer(Kind.OK, 1)
        (answer,) = await target.answers()
        assert isinstance(error_of(answer), Busy)
        await first.done()
        assert await first.receive() is None
        await hang_up(first)
        assert await target.answers() == []


async def test_invalid_answer_is_damaged(certificates: Credentials) -> None:
    """Whatever a target sends, the sender raises an error of the taxonomy."""

    async def invalid(context: Context) -> None:
        await context.write(b"hello")

    services = Services()
    services.add_plain(PUSH, invalid)
    ends = Linked(services, certificates)
    async with ends.listening("127.0.0.1:0") as port:
        call = PushCall(ends.connect(NODE, f"127.0.0.1:{port}"), MOVE)
        with pytest.raises(Damaged, match="an answer of 5 bytes"):
            await call.receive()


async def test_error_arrives_while_the_sender_is_writing(serve: Serve) -> None:
    """gRPC fails a write to a stream that the server has ended, and then drops what the server had sent."""
    async with serve(streams=1, deny=Denied("no")) as target:
        for _ in range(100):
            assert isinstance(error_of((await target.answers(*[GOOD.header(), b"good"] * 5))[0]), Denied)


async def test_sender_that_never_closes_is_disconnected(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_channel, "HANG_UP_S", 0.05)
    async with serve(streams=1, deny=Denied("no")) as target:
        stream = await target.stream()
        answer = await stream.receive()
        assert answer is not None
        assert isinstance(error_of(answer), Denied)
        assert await stream.receive() is None
        await hang_up(stream)
