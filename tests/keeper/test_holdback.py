"""The failure of a rank whose job has a snapshot is held back, for a rollback; a rank that ends well is not."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from shim.keeper.holdback import HOLD_BACK_S, HoldBack
from snapshotd.proc import tree
from tests.keeper.nodes import Node, python, until
from tests.keeper.test_relay import move_away

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="keepers need a daemon that runs as root")]


class Held:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.passed: list[int] = []
        self.timers: list[tuple[float, Any]] = []
        loop: Any = SimpleNamespace(after=lambda seconds, work: self.timers.append((seconds, work)))
        self.back = HoldBack(lambda: loop, self.told.append, self.passed.append)
        self.back.is_on = True


def test_failure_is_passed_on_when_the_time_for_a_rollback_is_over() -> None:
    held = Held()
    assert held.back.holds(256)
    assert (held.told, held.passed) == ([256], [])
    held.back.tell_again()
    assert held.told == [256, 256]
    assert held.timers[0][0] == HOLD_BACK_S
    held.timers[0][1]()
    assert held.passed == [256]
    assert not held.back.is_holding


def test_failure_of_a_rank_that_was_rolled_back_is_forgotten() -> None:
    held = Held()
    assert held.back.holds(9)
    held.back.forget()
    held.timers[0][1]()
    assert held.passed == []


def test_status_0_and_ranks_without_a_snapshot_are_not_held_back() -> None:
    held = Held()
    assert not held.back.holds(0)
    held.back.is_on = False
    assert not held.back.holds(9)
    assert held.told == []


def test_rank_that_was_asked_to_end_is_not_held_back_until_the_next_snapshot() -> None:
    held = Held()
    held.back.asked_to_end(signal.SIGUSR1)
    assert held.back.is_on
    held.back.asked_to_end(signal.SIGTERM)
    assert not held.back.holds(15)
    held.back.is_on = True  # the next snapshot
    assert held.back.holds(256)
    held.back.typed(b"abc")
    assert held.passed == []
    held.back.typed(b"\x03")  # a person does not want to wait
    assert held.passed == [256]
    held.timers[0][1]()
    assert held.passed == [256]


async def test_protected_rank_ends_at_once_after_ctrl_c(node: Node) -> None:
    keeper = await node.launch("/bin/sleep", "1000")  # Python that is just starting would end with status 1
    link = await node.reported("connected")
    await link.protect()
    await link.hold("m-0123456789ab")
    await link.resume("m-0123456789ab")
    keeper.send_signal(signal.SIGINT)
    async with asyncio.timeout(HOLD_BACK_S / 2):
        assert await keeper.wait() == -signal.SIGINT


async def test_home_keeper_of_a_protected_rank_reports_a_failure_and_waits(node: Node) -> None:
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    link = await node.reported("connected")
    await link.protect()
    assert link.rank is not None
    await link.hold("m-0123456789ab")  # it has handled what was sent before when it answers
    await link.resume("m-0123456789ab")
    link.rank.signal(signal.SIGKILL)
    await node.reported("failed")
    assert keeper.returncode is None
    await link.away("m-0123456789ab", "node-2")  # the job is rolled back, and the rank comes back elsewhere
    assert keeper.returncode is None


async def test_failure_of_a_protected_rank_during_a_snapshot_is_held_back_too(node: Node) -> None:
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    link = await node.reported("connected")
    await link.protect()
    assert link.rank is not None
    await link.hold("m-0123456789ab")
    link.rank.signal(signal.SIGKILL)
    await node.reported("died")
    await link.resume("m-0123456789ab")  # the snapshot is undone
    await node.reported("failed")
    await link.away("m-0123456789ac", "node-2")
    assert keeper.returncode is None


async def test_guest_keeper_holds_back_a_failure_during_a_snapshot(node: Node, other: Node) -> None:
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    guest, way = await move_away(node, other, ("sleep", "1000"))
    await guest.link.protect()
    await guest.link.hold("m-0123456789ac")
    (rank,) = tree.children(guest.keeper_pid)
    os.kill(rank, signal.SIGKILL)
    await other.reported("died")
    await guest.link.resume("m-0123456789ac")
    await other.reported("failed")
    assert keeper.returncode is None
    await way.cut()


async def test_home_keeper_of_a_protected_rank_that_ends_well_ends_at_once(node: Node) -> None:
    keeper = await node.launch(*python("import sys\nsys.stdin.readline()"))
    link = await node.reported("connected")
    await link.protect()
    await link.hold("m-0123456789ab")
    await link.resume("m-0123456789ab")
    await keeper.communicate(b"\n")
    assert keeper.returncode == 0
    await until(lambda: True)


async def test_home_keeper_prints_what_the_daemon_tells_it(node: Node) -> None:
    keeper = await node.launch(*python("import sys\nsys.stdin.readline()"))
    link = await node.reported("connected")
    await link.say("rank 0 was ended on node-1")
    await link.hold("m-0123456789ab")
    await link.resume("m-0123456789ab")
    _, errors = await keeper.communicate(b"\n")
    assert b"migrator run: rank 0 was ended on node-1" in errors
