"""A user who floods the daemon through the keepers' socket gets neither its event loop nor the threads of moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from typing import Any

import pytest

from shim.keeper.frames import Frame
from snapshotd.keepers import listener
from snapshotd.keepers.hello import Hello, Peer, check_keeper, parse_hello
from snapshotd.keepers.listener import KeeperLinks
from snapshotd.keepers.turns import BURST_S, SHARE, Turns
from snapshotd.proc.status import Status
from snapshotd.runtime.blocking import in_thread
from tests.installation import readable_python
from tests.keeper.nodes import Node, until
from tests.keeper.strangers import ALICE, BOB, Stranger

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users"),
]

OWN = ("sh", "-c", "echo; exec sleep 200")
_FRAMES = 40_000
#: Registers a rank, then sends relay frames as fast as possible, and says so.
_FLOOD = """
import json, socket, struct, subprocess, sys, time
child = subprocess.Popen(["sleep", "200"])
def frame(header):
    head = json.dumps(header).encode()
    return struct.pack("!IH", 2 + len(head), len(head)) + head
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
hello = {"t": "hello", "role": "home", "job": "job", "rank": 0, "relay_key": "0" * 32, "stdio": {}, "pid": child.pid}
connection.sendall(frame(hello))
connection.recv(1 << 16)
connection.sendall(frame({"t": "ack"}) * int(sys.argv[2]))
child.kill()
"""


async def test_flood_of_frames_leaves_the_event_loop_to_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, taken = 0, Counter[int]()
    take = KeeperLinks._take

    def counted(self: KeeperLinks, *args: Any) -> None:
        taken[turn] += 1
        take(self, *args)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(KeeperLinks, "_take", counted)
    counting = asyncio.create_task(count_turns())
    flood = await asyncio.create_subprocess_exec(
        *(readable_python(), "-I", "-c", _FLOOD, str(node.socket), str(_FRAMES)),
        cwd="/",
        user=ALICE,
        group=ALICE,
        extra_groups=[],
    )
    node.keep(flood)
    await until(lambda: taken.total() == _FRAMES, 120)
    counting.cancel()
    assert max(taken.values()) < 2000, "frames that were handled before anything else got a turn"


async def test_user_that_floods_is_slowed_to_its_share_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    turns = Turns()
    await turns.used(ALICE, BURST_S)
    await turns.used(BOB, BURST_S / 2)
    await turns.used(0, 100.0)
    assert slept == pytest.approx([0.0, 0.0, 0.0], abs=0.01)
    await turns.used(ALICE, 0.005)
    assert 0 < slept[-1] <= 0.005 / SHARE
    await turns.used(BOB, 0.005)
    assert slept[-1] == 0.0


async def test_hellos_of_one_user_take_no_threads_of_moves_or_of_other_users(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a keeper with 100,000 children, through which the daemon has to look."""
    let_end, arrived = threading.Event(), 0

    def slow(peer: Peer) -> Status:
        if peer.user_id == ALICE:
            let_end.wait(120)
        return check_keeper(peer)

    def parse(frame: Frame, user_id: int) -> Hello:
        nonlocal arrived
        arrived += 1
        return parse_hello(frame, user_id)

    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 600.0)
    monkeypatch.setattr(listener, "check_keeper", slow)
    monkeypatch.setattr(listener, "parse_hello", parse)
    alice = [await Stranger.connect(node, ALICE) for _ in range(40)]
    hellos = [asyncio.create_task(one.hello(pid=1)) for one in alice]
    try:
        await until(lambda: arrived == len(alice), 120)
        assert await asyncio.wait_for(asyncio.gather(*(in_thread(int) for _ in range(8))), 60) == [0] * 8
        bob = await Stranger.connect(node, BOB)
        async with asyncio.timeout(60):
            assert (await bob.hello(pid=await bob.start(*OWN)))["t"] == "welcome"
    finally:
        let_end.set()
        for hello in hellos:
            with contextlib.suppress(Exception):
                await hello
