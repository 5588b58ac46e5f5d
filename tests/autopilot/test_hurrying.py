"""A rank that must leave and of which a snapshot is being copied waits; its copy, and no other, is sent without its limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from migrator.autopilot import hurrying
from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import about_ranks
from migrator.autopilot.hurrying import kept_by_others
from migrator.autopilot.model import MoveState
from migrator.autopilot.policy import Policy
from migrator.cluster import Cluster
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import results, running, until
from tests.autopilot.worlds import NOW, TAINTED, acting, alarm, move, node, rank, world
from tests.cli.conftest import a_rank

COPY, OTHER = "m-aaaaaaaaaaaa", "m-bbbbbbbbbbbb"


def hurried(pilots: PilotCluster, name: str) -> list[str]:
    return [request.move for method, request in list(pilots[name].asked) if method == "Hurry"]


def said(condition: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def ask() -> Any:
        return condition()

    return ask


async def test_evacuated_rank_has_its_copy_sent_without_a_limit_and_then_moves(
    pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hurrying, "AGAIN_S", 0.05)
    pilots["node-1"].ranks.append(a_rank("node-1", moving=COPY))
    pilots["node-2"].ranks.append(a_rank("node-2", 1, moving=OTHER))
    pilots["node-2"].copying.add(OTHER)
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        # The snapshot is being taken: its copy begins later, so it is asked for again.
        await until("requests before the copy", said(lambda: len(hurried(pilots, "node-1")) > 2))
        pilots["node-1"].copying.add(COPY)
        before = len(hurried(pilots, "node-1"))
        await until("requests for the copy", said(lambda: len(hurried(pilots, "node-1")) > before + 2))
        assert pilots.begun() == 0
        pilots["node-1"].copying.clear()
        pilots["node-1"].ranks[0].moving = ""
        assert await results(store) == [("spare-1", "moved")]
        assert set(hurried(pilots, "node-1")) == {COPY}
        assert hurried(pilots, "node-2") == []
    assert pilots.places() == {"train-0-00000001": "spare-1", "train-1-00000001": "node-2"}


async def test_no_more_is_asked_when_the_rank_waits_no_longer(
    pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hurrying, "AGAIN_S", 0.05)
    made = hurrying.Hurrying(Cluster.read(pilots.path))
    made.only({("node-1", COPY), ("node-2", OTHER)})
    await until("both to be asked", said(lambda: hurried(pilots, "node-1") and hurried(pilots, "node-2")))
    kept, ended = made.tasks["node-1", COPY], made.tasks["node-2", OTHER]
    made.only({("node-1", COPY)})
    await asyncio.gather(ended, return_exceptions=True)
    assert ended.cancelled()
    assert set(made.tasks) == {("node-1", COPY)}
    assert made.tasks["node-1", COPY] is kept
    made.only(set())
    await asyncio.gather(kept, return_exceptions=True)
    assert kept.cancelled()
    assert not made.tasks


@pytest.mark.parametrize(
    ("policy", "own_move", "expected"),
    [
        (acting(), False, {("node-1", COPY)}),
        (acting(), True, set()),  # its own move keeps it
        (acting("observe"), False, set()),  # it need not leave
        (acting(jobs=[{"job": "train", "move": False}]), False, set()),  # it does not leave anyway
    ],
)
def test_only_a_rank_that_would_leave_is_hurried(
    policy: Policy, own_move: bool, expected: set[tuple[str, str]]
) -> None:
    waits = rank(0, "node-1", moving=COPY)
    parts: list[Any] = [node("node-1", state=TAINTED), node("spare-1"), node("spare-2"), waits, alarm("node-1")]
    if own_move:
        parts.append(move(waits, "spare-1", MoveState.INTENDED))
    found = world(*parts)
    decided = about_ranks(found, policy, NOW)
    assert all(about.decision is RankDecision.WAIT for about in decided)
    assert kept_by_others(found, policy, decided, NOW) == expected
