"""What a hostile network process can send: every violation of the protocol closes the link, and nothing else happens."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.calls import MAX_MESSAGE_BYTES, CallFailed
from snapshotd.network import link as link_module
from snapshotd.network.frames import (
    FROM_DAEMON,
    FROM_NETWORK,
    LENGTH,
    MAX_FRAME_BYTES,
    Cancel,
    Credit,
    Data,
    Dial,
    Done,
    End,
    Files,
    Frame,
    Listening,
    Ping,
    Pong,
    Settings,
    Stop,
    Violation,
    decode,
    encode,
)
from tests.network.ends import pair, raw, request, sent, unread


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([request(1), request(1)], id="number used twice"),
        pytest.param([request(2)], id="number of the other side"),
        pytest.param([request(5), request(3)], id="number that goes back"),
        pytest.param([Data(1, b"x")], id="message of a call that was never opened"),
        pytest.param([Data(2, b"x")], id="message of a call that the daemon never opened"),
        pytest.param([End(7, "OK")], id="end of a call that was never opened"),
        pytest.param([request(1), End(1, "OK")], id="end by the caller"),
        pytest.param([request(1), Done(1), Data(1, b"x")], id="message after the last one"),
        pytest.param([request(1), Done(1), Done(1)], id="last message twice"),
        pytest.param([request(1), Credit(1, 1)], id="credit for nothing"),
        pytest.param([request(1), *[Data(1, bytes(1 << 20))] * 6], id="more than the window"),
    ],
)
async def test_violation_closes_the_link(frames: list[Frame]) -> None:
    async with raw(unread) as (end, task):
        sending = asyncio.create_task(sent(end, *frames))
        assert "violated the protocol" in await asyncio.wait_for(task, 60)
        await asyncio.wait([sending])
        sending.exception()


async def test_too_many_calls_close_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_CALLS", 3)

    async with pair(unread) as ends:
        calls = [ends.open() for _ in range(3)]
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED"):
            await ends.open().read()
        assert [call.ended for call in calls] == [None] * 3
    async with raw(unread) as (end, task):
        await sent(end, *(request(number) for number in (1, 3, 5, 7)))
        assert "more than 3 calls" in await asyncio.wait_for(task, 60)


async def test_frame_that_is_too_large_is_not_read() -> None:
    async with raw() as (end, task):
        await asyncio.get_running_loop().sock_sendall(end, LENGTH.pack(MAX_FRAME_BYTES + 1))
        assert "violated the protocol: a frame of" in await asyncio.wait_for(task, 60)


async def test_peer_that_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that nobody takes must not pile up."""
    monkeypatch.setattr(link_module, "MAX_BACKLOG_BYTES", 1 << 16)
    async with raw() as (end, task):

        async def flood() -> None:
            while True:
                await sent(end, *[Ping()] * 1000)

        flooding = asyncio.create_task(flood())
        assert await asyncio.wait_for(task, 30) == "it closed the link"
        flooding.cancel()
        await asyncio.wait([flooding])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x10\x01",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([1, 0, b"x"]),
        msgspec.msgpack.encode([1, -1, b"x"]),
        msgspec.msgpack.encode([1, 1, "text"]),
        msgspec.msgpack.encode([1, 1, bytes(MAX_MESSAGE_BYTES + 1)]),
        msgspec.msgpack.encode([1, 1, b"x", "more"]),
        msgspec.msgpack.encode([16, 1, "/m", "superuser", "x", []]),
        msgspec.msgpack.encode([16, 1, "/m" * 100, "root", "x", []]),
        msgspec.msgpack.encode([16, 1, "/m", "root", "x", [("move", "m-1")] * 9]),
        msgspec.msgpack.encode([16, 1, "/m", "root", "x", [("move",)]]),
        msgspec.msgpack.encode([3, 1, "ok", "", b""]),
        msgspec.msgpack.encode([17, 70000]),
        msgspec.msgpack.encode({"kind": 6}),
    ],
)
async def test_malformed_frame_closes_the_link(body: bytes) -> None:
    async with raw() as (end, task):
        await asyncio.get_running_loop().sock_sendall(end, LENGTH.pack(len(body)) + body)
        assert "violated the protocol: a malformed frame" in await asyncio.wait_for(task, 60)


@pytest.mark.parametrize(
    "frame",
    [
        Settings("127.0.0.1:1", "admin.sock", ""),
        Files(b"ca", b"cert", b"key", []),
        Stop(1.0),
        Dial(1, 1, "127.0.0.1:1", "node-1", "/m", [], None),
    ],
)
async def test_each_side_accepts_only_what_the_other_one_may_send(frame: Frame) -> None:
    body = encode(frame)[LENGTH.size :]
    assert decode(FROM_DAEMON, body) == frame
    with pytest.raises(Violation):
        decode(FROM_NETWORK, body)
    for ours in (request(1), Listening(1)):
        with pytest.raises(Violation):
            decode(FROM_DAEMON, encode(ours)[LENGTH.size :])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_violation(body: bytes) -> None:
    for decoder in (FROM_NETWORK, FROM_DAEMON):
        with contextlib.suppress(Violation):
            assert isinstance(decode(decoder, body), Frame)


_NUMBERS = st.integers(min_value=1, max_value=8)
_FRAMES = st.one_of(
    st.builds(request, _NUMBERS),
    st.builds(Data, _NUMBERS, st.binary(max_size=20)),
    st.builds(Done, _NUMBERS),
    st.builds(Cancel, _NUMBERS),
    st.builds(End, _NUMBERS, st.just("OK")),
    st.builds(Credit, _NUMBERS, st.integers(min_value=1, max_value=100)),
    st.just(Ping()),
    st.just(Pong()),
)


@given(st.lists(_FRAMES, max_size=12))
def test_any_order_of_frames_is_served_or_closes_the_link(frames: list[Frame]) -> None:
    async def send_them() -> str:
        async with raw() as (end, task):
            await sent(end, *frames)
            end.shutdown(socket.SHUT_WR)
            return await asyncio.wait_for(task, 60)

    assert asyncio.run(send_them()).startswith(("it closed the link", "it violated the protocol"))
