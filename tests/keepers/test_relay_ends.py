"""However a relay ends, it leaves no task that waits for frames and would take those of the next connection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from shim.keeper.frames import encode
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, RankGone, Unreachable
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.relay import Relays
from tests.served import Register, Serve, Served, servicer

ENTRY: Any = SimpleNamespace(
    uid="job-0-00000001",
    role="guest",
    home_node="node-1",
    home_endpoint="",
    relay_key="key",
    own_key="",
    former_keys=[],
)
HELLO = encode("sync", {})


@pytest.fixture(autouse=True)
async def nothing_is_abandoned() -> AsyncIterator[None]:
    """asyncio reports tasks and generators that were abandoned when they are collected."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(str(context)))
    yield
    gc.collect()
    for _ in range(3):  # generators that were dropped are closed by the loop
        await asyncio.sleep(0)
    assert heard == []


def relays(served: Served) -> Relays:
    node: Any = SimpleNamespace(client=lambda name, endpoint: served.root())
    return Relays(node)


def keeper() -> KeeperLink:
    stand_in: Any = SimpleNamespace(role="guest", pid=1, user_id=0, is_closing=lambda: False)
    return KeeperLink(stand_in, ENTRY.uid, stand_in, None, stand_in)


def home(*answers: pb.RelayFrame, error: Exception | None = None) -> tuple[Register, list[bytes], asyncio.Event]:
    """A home node that returns these answers, then ends the call with an error or waits; and the frames that it received."""
    got, opened = list[bytes](), asyncio.Event()

    async def relay(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        for answer in answers:
            yield answer
        opened.set()
        if error is not None:
            raise error
        async for frame in frames:
            if frame.frame:
                got.append(frame.frame)

    return servicer("Home", Relay=relay), got, opened


@pytest.mark.parametrize("error", [RankGone("the home keeper is dead"), Denied("another node has the rank"), None])
async def test_exit_status_is_reported_unless_the_home_keeper_has_ended(serve: Serve, error: Exception | None) -> None:
    answers = [] if error else [pb.RelayFrame(), pb.RelayFrame(frame=encode("exitack", {}))]
    register, _, _ = home(*answers, error=error)
    async with serve(register) as served:
        await relays(served).report_end(ENTRY, 0)


async def test_home_node_that_times_out_is_retried(serve: Serve) -> None:
    calls = []

    async def relay(frames: AsyncIterator[pb.RelayFrame], context: Any) -> AsyncIterator[pb.RelayFrame]:
        calls.append(1)
        if len(calls) == 1:
            raise Unreachable("the keeper has not reconnected yet")
        yield pb.RelayFrame(frame=encode("exitack", {}))

    async with serve(servicer("Home", Relay=relay)) as served:
        await relays(served).report_end(ENTRY, 0)
    assert len(calls) == 2


@pytest.mark.parametrize("ending", ["home is dead", "cancelled"])
async def test_ended_connection_takes_no_frame_from_the_next(serve: Serve, ending: str) -> None:
    link = keeper()
    register, got, opened = home(error=RankGone("the home keeper is dead") if ending == "home is dead" else None)
    async with serve(register) as served:
        first = asyncio.create_task(relays(served)._once(ENTRY, link))
        await opened.wait()
        if ending == "cancelled":
            first.cancel()
        with pytest.raises((RankGone, asyncio.CancelledError)):
            await first
    link._relay.put_nowait(HELLO)
    link._relay.put_nowait(None)
    assert [frame async for frame in link.relay_frames()] == [HELLO]
    assert got == []


async def test_nothing_is_kept_of_a_relay_that_has_ended(serve: Serve) -> None:
    """A rank has a new link after each move, and its node may see thousands of ranks."""
    async with serve(servicer("Home")) as served:
        all_relays, link = relays(served), keeper()
        link.closed.set()
        all_relays.start(ENTRY, link)
        (task,) = all_relays._out.values()
        await task
        await asyncio.sleep(0)  # callbacks of the task run in the next turn
        assert not all_relays._out
