"""Calls over the link between the daemon and its network process: flow control, cancellation, death of either end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from snapshotd.api.calls import MAX_MESSAGE_BYTES, CallEnded, CallFailed
from snapshotd.network import link as link_module
from snapshotd.network.accounts import WINDOW_COST
from snapshotd.network.frames import (
    FROM_DAEMON,
    FROM_NETWORK,
    Dial,
    Frame,
    Pong,
)
from snapshotd.network.link import Call, Link
from tests.network.ends import Pair, pair, refuse, request, sent, unread

# ---------------------------------------------------------------- calls


async def test_messages_travel_in_both_directions_and_the_call_ends() -> None:
    async with pair() as ends:
        call = ends.open()
        for message in (b"", b"one", b"x" * MAX_MESSAGE_BYTES):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is None
        assert (ends.daemon.calls, ends.network.calls) == ({}, {})
        with pytest.raises(CallEnded):
            await call.write(b"late")


async def test_many_calls_at_a_time_are_kept_apart() -> None:
    async def one(ends: Pair, number: int) -> None:
        call = ends.open()
        for step in range(5):
            await call.write(f"{number}:{step}".encode())
            assert await call.read() == f"{number}:{step}".encode()
        await call.done_writing()
        assert await call.read() is None

    async with pair() as ends:
        await asyncio.gather(*(one(ends, number) for number in range(50)))
        assert ends.daemon.calls == {}


async def test_failure_arrives_after_the_messages_before_it() -> None:
    async def failing(call: Call) -> None:
        await call.write(b"first")
        raise CallFailed("ABORTED", "details", b"wire form")

    async with pair(failing) as ends:
        call = ends.open()
        assert await call.read() == b"first"
        with pytest.raises(CallFailed) as got:
            await call.read()
        assert (got.value.status, got.value.details, got.value.error) == ("ABORTED", "details", b"wire form")


async def test_unexpected_exception_ends_only_its_call(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(call: Call) -> None:
        raise ZeroDivisionError

    async with pair(broken) as ends:
        for _ in range(2):
            with pytest.raises(CallFailed, match="INTERNAL"):
                await ends.open().read()
    assert "ZeroDivisionError" in caplog.text


async def test_cancellation_cancels_the_servicer() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(call: Call) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with pair(slow) as ends:
        call = ends.open()
        await asyncio.wait_for(entered.wait(), 60)
        call.cancel()
        with pytest.raises(CallFailed, match="CANCELLED"):
            await call.read()
        await asyncio.wait_for(cancelled.wait(), 60)
        assert ends.daemon.calls == {}


async def test_call_without_an_answer_ends_by_its_own_limit() -> None:
    async def silent(call: Call) -> None:
        await asyncio.Event().wait()

    async with pair(silent) as ends:
        call = ends.open()
        call.limit(0.05)
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await asyncio.wait_for(call.read(), 60)


async def test_message_that_is_too_large_is_refused_by_the_writer() -> None:
    async with pair() as ends:
        with pytest.raises(CallFailed, match="larger than max"):
            await ends.open().write(bytes(MAX_MESSAGE_BYTES + 1))


# ---------------------------------------------------------------- flow control


@pytest.mark.parametrize("size", [0, 1000, 1 << 20, 5 << 20])
async def test_writer_waits_for_a_reader_that_does_not_read(size: int) -> None:
    async with pair(unread) as ends:
        call, written = ends.open(), 0

        async def fill() -> None:
            nonlocal written
            while True:
                await call.write(bytes(size))
                written += 1

        filling = asyncio.create_task(fill())
        while call.sending.used_cost < WINDOW_COST:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (there,) = ends.daemon.calls.values()
        while there.unread.used_cost < WINDOW_COST:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not filling.done()
        assert there.unread.used_cost < WINDOW_COST + size + 64
        assert written * (size + 64) < WINDOW_COST + size + 64
        before = written
        while written == before:  # one that is read makes room for the next one
            await there.read()
            await asyncio.sleep(0.01)
        filling.cancel()


async def test_writer_that_waits_is_released_when_the_call_ends() -> None:
    let_end = asyncio.Event()

    async def ends_early(call: Call) -> None:
        await let_end.wait()

    async with pair(ends_early) as ends:
        call = ends.open()
        writing = asyncio.create_task(call.write(bytes(WINDOW_COST)))
        await writing
        waiting = asyncio.create_task(call.write(b"next"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        let_end.set()
        with pytest.raises(CallEnded):
            await asyncio.wait_for(waiting, 60)


# ---------------------------------------------------------------- the death of either end


async def test_death_of_the_network_process_cancels_servicers_and_fails_calls() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(call: Call) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    ours, theirs = socket.socketpair()
    daemon = Link(FROM_NETWORK, slow, lambda frame: None, first=2)
    await daemon.attach(ours)
    task = asyncio.create_task(daemon.run())
    call = daemon.open(lambda number: Dial(number, 1, "10.0.0.2:7070", "node-2", "/m", [], None))
    theirs.setblocking(False)
    await sent(theirs, request(1))
    await asyncio.wait_for(entered.wait(), 60)
    theirs.close()
    assert await asyncio.wait_for(task, 60) == "it closed the link"
    await asyncio.wait_for(cancelled.wait(), 60)
    with pytest.raises(CallFailed, match="UNAVAILABLE"):
        await call.read()
    with pytest.raises(CallFailed, match="UNAVAILABLE"):  # and so does every later one
        await daemon.open(lambda number: Dial(number, 1, "10.0.0.2:7070", "node-2", "/m", [], None)).read()


async def test_peer_that_hangs_is_noticed_while_calls_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LOOK_S", 0.01)
    monkeypatch.setattr(link_module, "ASK_AFTER_S", 0.02)
    monkeypatch.setattr(link_module, "DEAD_AFTER_S", 0.1)
    ours, theirs = socket.socketpair()
    network = Link(FROM_DAEMON, refuse, lambda frame: None, first=1)
    await network.attach(ours)
    task = asyncio.create_task(network.run())
    with pytest.raises(CallFailed, match="snapshotd does not respond"):
        await asyncio.wait_for(network.open(request).read(), 60)
    assert not task.done(), "it may respond again"
    theirs.close()
    await asyncio.wait_for(task, 60)


async def test_peer_that_answers_pings_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LOOK_S", 0.01)
    monkeypatch.setattr(link_module, "ASK_AFTER_S", 0.02)
    monkeypatch.setattr(link_module, "DEAD_AFTER_S", 5.0)
    asked = asyncio.Event()

    async def slow(call: Call) -> None:
        await asyncio.Event().wait()

    async with pair(slow) as ends:
        call = ends.open()
        pongs = ends.network._arrived

        def watched(frame: Frame) -> None:
            if isinstance(frame, Pong):
                asked.set()
            pongs(frame)

        monkeypatch.setattr(ends.network, "_arrived", watched)
        await asyncio.wait_for(asked.wait(), 60)
        assert call.ended is None
