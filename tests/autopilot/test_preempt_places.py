"""Which place is freed for a rank, and who gets a place that was freed."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.autopilot.facts import about_ranks
from migrator.autopilot.model import MoveState
from migrator.autopilot.policy import Policy
from migrator.autopilot.world import World
from tests.autopilot.worlds import NOW, TAINTED, acting, alarm, gpu, move, node, rank, world


def half(name: str) -> Any:
    """A node with two GPUs, one of them free."""
    return node(name, gpus=(gpu(name, 0), gpu(name, 1, free=False)), driver="580.1")


def moves(there: World, by: Policy) -> dict[str, str]:
    return {about.rank.job: about.target for about in about_ranks(there, by, NOW) if about.target}


@pytest.mark.parametrize("made", [False, True], ids=["nothing freed yet", "one place freed"])
def test_node_where_fewest_leave_is_found_among_many(made: bool) -> None:
    """One rank must leave z, and two must leave any of the others, which are preferred otherwise: they are used up more."""
    big = rank(0, "node-1", "gpt", gpus=(0, 1))
    parts: list[Any] = [node("node-1", 2, state=TAINTED), alarm("node-1"), big, half("spare-1"), half("spare-2")]
    for number in range(20):
        name = f"a{number:02d}"
        parts += [node(name, 2), *(rank(index, name, f"low{number}-{index}", gpus=(index,)) for index in range(2))]
    parts += [half("z"), rank(99, "z", "lowz", gpus=(1,))]
    if made:
        parts.append(move(rank(98, "z", "gone", gpus=(0,)), "spare-9", MoveState.MOVED, 60, makes_room_for=big.uid))
    by = acting(spares={"preempt": "move"}, jobs=[{"job": "gpt", "priority": 10}])
    assert moves(world(*parts), by) == {"lowz": "spare-1"}


def test_lower_priority_takes_no_freed_place_beside_a_higher_one() -> None:
    """A place on node-9 was freed for mid. hi may take it, and lo may not, also if both leave the same node."""
    mid, high, low = (
        rank(0, "node-2", "mid", gpus=(0,)),
        rank(1, "node-1", "hi", gpus=(0,)),
        rank(2, "node-1", "lo", gpus=(1,)),
    )
    freed = move(rank(9, "node-9", "gone", gpus=(0,)), "spare-9", MoveState.MOVED, 60, makes_room_for=mid.uid)
    parts: list[Any] = [node(name, 2, state=TAINTED) for name in ("node-1", "node-2")]
    parts += [alarm("node-1"), alarm("node-2"), half("node-9"), half("node-7"), mid, low, freed]
    jobs = [{"job": "hi", "priority": 10}, {"job": "mid", "priority": 5}]
    by = acting(spares={"preempt": "move", "floating": True}, jobs=jobs, breaker={"nodes_percent": 80, "moves": 9})
    assert moves(world(*parts, high), by) == {"hi": "node-7", "mid": "node-9"}
    assert moves(world(*parts), by)["mid"] in ("node-7", "node-9")
