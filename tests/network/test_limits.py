"""What one caller can take of the daemon: calls, memory and log records. Each test is an attack with one certificate."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.access import Role
from snapshotd.api.calls import CallFailed
from snapshotd.api.channel import open_channel
from snapshotd.api.errors import Denied
from snapshotd.network import link as link_module
from snapshotd.network import server
from snapshotd.network.dispatch import Context
from snapshotd.network.frames import Data, Frame, Request
from snapshotd.network.link import Call
from snapshotd.runtime.blocking import in_thread
from tests.network.ends import Pair, pair, raw, sent, unread
from tests.served import Certificates, Serve, servicer

RELAY, GET_NODE = "/snapshotd.v1.Home/Relay", "/snapshotd.v1.Node/GetNode"
MIB = 1 << 20
MAX_CALLS: int = vars(link_module)["MAX_CALLS"]


def opened(ends: Pair, role: Role, name: str, method: str = RELAY) -> Call:
    return ends.network.open(lambda number: Request(number, method, role, name, []))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- calls


async def test_one_caller_cannot_use_up_the_calls_of_others() -> None:
    async with pair() as ends:
        calls = [opened(ends, "node", "node-2") for _ in range(MAX_CALLS)]
        assert any(call.ended for call in calls)
        for role, name in (("operator", "alice"), ("node", "node-3"), ("root", "root")):
            other = opened(ends, role, name)  # type: ignore[arg-type]
            await other.write(b"hello")
            assert await asyncio.wait_for(other.read(), 30) == b"hello"
        next(call for call in calls if not call.ended).cancel()
        again = opened(ends, "node", "node-2")  # a call that has ended makes room
        await again.write(b"again")
        assert await asyncio.wait_for(again.read(), 30) == b"again"


async def test_daemon_counts_callers_itself() -> None:
    """Also if the network process does not."""
    served: list[Call] = []

    async def serve(call: Call) -> None:
        served.append(call)
        await asyncio.Event().wait()

    async with raw(serve) as (end, task):
        many = [Request(number, RELAY, "node", "node-2", []) for number in range(1, 2 * MAX_CALLS, 2)]
        sending = asyncio.create_task(sent(end, *many[:-1], Request(2 * MAX_CALLS - 1, RELAY, "node", "node-3", [])))
        received = asyncio.create_task(_drain(end))
        await until(lambda: task.done() or (bool(served) and served[-1].number == 2 * MAX_CALLS - 1))
        assert not task.done()
        assert len(served) < MAX_CALLS / 2
        received.cancel()
        await asyncio.wait([sending, received])


async def _drain(end: object) -> None:
    while await asyncio.get_running_loop().sock_recv(end, 1 << 16):  # type: ignore[arg-type]
        pass


async def test_cancelled_calls_count_until_their_work_has_ended() -> None:
    """Otherwise one caller that cancels fills the daemon with servicers that wait for a thread."""
    let_end, running = threading.Event(), 0

    async def serve(call: Call) -> None:
        nonlocal running
        running += 1
        try:
            await in_thread(let_end.wait, 60)
        finally:
            running -= 1

    async with pair(serve) as ends:
        try:
            for _ in range(MAX_CALLS):
                call = opened(ends, "node", "node-2")
                await asyncio.sleep(0)
                call.cancel()
            last = opened(ends, "operator", "alice")
            await until(lambda: last.number in ends.daemon.calls)  # all others have arrived too
            assert running <= MAX_CALLS / 4
        finally:
            let_end.set()
            await until(lambda: not running)


# ---------------------------------------------------------------- memory


async def test_one_caller_cannot_fill_the_memory_of_the_daemon() -> None:
    async with pair(unread) as ends:
        calls = [opened(ends, "node", "node-2") for _ in range(40)]
        filling = [asyncio.create_task(_fill(call, 4 * MIB)) for call in calls]
        other = opened(ends, "operator", "alice")
        await asyncio.wait_for(other.write(bytes(5 * MIB)), 60)
        last = opened(ends, "node", "node-2")
        await asyncio.wait_for(last.write(b"small ones do not wait for large ones"), 60)
        await until(lambda: last.number in ends.daemon.calls and bool(ends.daemon.calls[last.number]._unread))
        assert _held(ends) < 100 * MIB
        for task in filling:
            task.cancel()
        await asyncio.wait(filling)


async def test_room_that_one_call_frees_is_used_by_another_call_of_the_same_caller() -> None:
    async with pair(unread) as ends:
        calls = [opened(ends, "node", "node-2") for _ in range(40)]
        writes = [asyncio.create_task(call.write(bytes(4 * MIB))) for call in calls]
        await until(lambda: any(write.done() for write in writes))
        pending = [write for write in writes if not write.done()]
        for call, write in zip(calls, writes, strict=True):
            if write.done():
                call.cancel()
        done, _ = await asyncio.wait(pending, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert done
        for call in calls:
            call.cancel()
        await asyncio.wait(writes)


async def test_network_process_that_exceeds_the_memory_of_a_caller_or_of_all_loses_the_link() -> None:
    for name in ("node-2", "node-{}"):  # one caller, or as many as it invents
        frames: list[Frame] = []
        for number in range(1, 161, 2):
            frames.append(Request(number, RELAY, "node", name.format(number), []))
            frames.append(Data(number, bytes(4 * MIB)))
        async with raw(unread) as (end, task):
            sending = asyncio.create_task(sent(end, *frames))
            assert "more messages than it has credit for" in await asyncio.wait_for(task, 60)
            await asyncio.wait([sending])
            sending.exception()


async def _fill(call: Call, size: int) -> None:
    while True:
        await call.write(bytes(size))


def _held(ends: Pair) -> int:
    return sum(len(message) for call in ends.daemon.calls.values() for message in call._unread)


# ---------------------------------------------------------------- messages of calls that have only one


async def test_second_request_of_a_unary_call_closes_the_link_of_a_hostile_network_process() -> None:
    async with raw(unread) as (end, task):
        await sent(end, Request(1, GET_NODE, "root", "root", []), Data(1, b"x"), Data(1, b"x"))
        assert "a second message" in await asyncio.wait_for(task, 60)


async def test_second_request_of_a_unary_call_is_refused(serve: Serve, certificates: Certificates) -> None:
    async def get_node(request: pb.GetNodeRequest, context: Context) -> pb.NodeInfo:
        await asyncio.Event().wait()
        raise AssertionError

    async with serve(servicer("Node", GetNode=get_node)) as served:
        async with open_channel(served.endpoint, certificates.other_node, "node-1") as channel:
            call: Any = channel.stream_stream(GET_NODE)()
            await call.write(b"")
            await call.write(b"")
            assert await asyncio.wait_for(call.code(), 30) is grpc.StatusCode.INVALID_ARGUMENT
        async with served.operator() as client:  # the link is up
            with pytest.raises(Exception, match="in time"):
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=0.5)


async def test_second_reply_to_a_unary_call_is_refused() -> None:
    async def twice(call: Call) -> None:
        await call.write(b"one")
        await call.write(b"two")

    async with pair(twice) as ends:
        call = opened(ends, "root", "root", GET_NODE)
        assert await call.read() == b"one"
        with pytest.raises(CallFailed, match="a second message"):
            await call.read()


# ---------------------------------------------------------------- threads


async def test_questions_of_one_caller_take_no_threads_of_moves_or_of_other_callers(
    serve: Serve, certificates: Certificates
) -> None:
    let_end, asked = threading.Event(), 0

    async def list_ranks(request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        nonlocal asked
        asked += 1
        if context.caller.role == "node":
            await in_thread(let_end.wait, 120)
        else:
            await in_thread(int)
        return pb.ListRanksReply()

    async with (
        serve(servicer("Node", ListRanks=list_ranks)) as served,
        served.by(certificates.other_node) as node,
        served.operator() as operator,
    ):
        asking = [asyncio.create_task(node.node.ListRanks(pb.ListRanksRequest(), timeout_s=120)) for _ in range(100)]
        try:
            await until(lambda: asked >= 32)
            await operator.node.ListRanks(pb.ListRanksRequest(), timeout_s=60)
            assert await asyncio.wait_for(in_thread(lambda: "a move"), 60) == "a move"
            assert asked <= 40
        finally:
            let_end.set()
        await asyncio.gather(*asking)


# ---------------------------------------------------------------- log records


async def test_refused_certificate_does_not_fill_the_log(
    serve: Serve, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        serve(servicer("Node")) as served,
        served.by(certificates.other_node) as node,
        served.by(certificates.wrong_role) as stranger,
    ):
        for _ in range(50):
            with pytest.raises(Denied):
                await node.source.Begin(pb.BeginRequest(), timeout_s=10)
            with pytest.raises(Denied):
                await stranger.node.GetNode(pb.GetNodeRequest(), timeout_s=10)
    about = [record for record in caplog.records if record.name.startswith("snapshotd")]
    assert 2 <= len(about) <= 30, "it is logged, but not each time"
    assert "leaving out the rest" in caplog.text


async def test_calls_that_fail_do_not_fill_the_log_of_the_daemon(
    serve: Serve, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def list_ranks(request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        raise Denied("not this one")

    async with serve(servicer("Node", ListRanks=list_ranks)) as served, served.by(certificates.other_node) as node:
        for _ in range(50):
            with pytest.raises(Denied):
                await node.node.ListRanks(pb.ListRanksRequest(), timeout_s=10)
    assert caplog.text.count("not this one") == 10


# ---------------------------------------------------------------- connections


async def test_connection_without_a_certificate_is_closed_after_a_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise strangers on the network hold memory and descriptors of the network process for two minutes each."""
    options = dict(server.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] <= 30_000
    short = tuple({**options, "grpc.server_handshake_timeout_ms": 300}.items())
    monkeypatch.setattr(server, "SERVER_OPTIONS", short)
    async with serve(servicer("Node")) as served:
        host, port = served.endpoint.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
