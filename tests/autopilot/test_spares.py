"""The choice of spares: what a rank needs is there, nothing is given away twice, a gang stays together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.autopilot.model import Gpu, MoveState, NodeState
from migrator.autopilot.policy import Spares
from migrator.autopilot.spares import free_spares, place
from tests.autopilot.worlds import GIB, gpu, move, node, rank, world

GANG = [rank(number, "node-1", gpus=(number,)) for number in range(8)]


def part(name: str, count: int, free: int) -> tuple[Gpu, ...]:
    """The GPUs of a node, some of them free."""
    return tuple(gpu(name, number, free=number < free) for number in range(count))


def test_whole_node_goes_to_one_spare() -> None:
    placed = place(world(node("node-1", 8), node("spare-1", 4), node("spare-2", 8), *GANG), GANG, Spares())
    assert set(placed.targets.values()) == {"spare-2"}


def test_gang_is_spread_if_no_spare_has_room_for_all() -> None:
    half = [node(name, gpus=part(name, 8, free=4), driver="580.1") for name in ("spare-1", "spare-2")]
    there = world(node("node-1", 8), *half, *GANG)
    assert Counter(place(there, GANG, Spares()).targets.values()) == {"spare-1": 4, "spare-2": 4}
    assert place(there, GANG, Spares(gang="require")).targets == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": NodeState.SUSPECT}, "is suspect"),
        ({"state": NodeState.RETURNED}, "is returned"),
        ({"reachable": False}, "does not answer"),
        ({"seen": False}, "does not answer"),
        ({"driver": "570"}, "has driver 570, not 580.1"),
        ({"labels": {}}, "is no spare"),
        ({"labels": {"spare": "dedicated", "network": "b"}}, "another network domain"),
        ({"memory_free_bytes": GIB - 1}, "has no room"),
        ({"gpus": (gpu("spare-1", 0, model="NVIDIA A100"),)}, "has no room"),
        ({"gpus": (gpu("spare-1", 0, free=False),)}, "has no room"),
        ({"gpus": (replace(gpu("spare-1", 0), memory_bytes=80 * GIB),)}, "has no room"),
    ],
)
def test_unfit_spare_is_not_used_and_the_reason_is_said(change: dict[str, object], reason: str) -> None:
    one = rank(0, "node-1", gpus=(0,))
    assert place(world(node("node-1", 1), node("spare-1", 1), one), [one], Spares()).targets
    placed = place(world(node("node-1", 1), node("spare-1", 1, **change), one), [one], Spares())
    assert placed.targets == {}
    assert reason in placed.reason


@pytest.mark.parametrize(
    ("source", "target", "gpus", "fits"),
    [(GIB, GIB, (0,), True), (0, GIB, (0,), False), (GIB, 0, (0,), False), (GIB, GIB, (0, 1), False)],
    ids=["both hold it", "the source does not", "the target does not", "on two GPUs"],
)
def test_device_memory_needs_a_window_alone_if_both_nodes_hold_it(
    source: int, target: int, gpus: tuple[int, ...], fits: bool
) -> None:
    one = rank(0, "node-1", gpus=gpus, device_bytes=100 * GIB)
    spare = node("spare-1", 2, memory_free_bytes=2 * GIB, device_window_bytes=target)
    there = world(node("node-1", 2, device_window_bytes=source), spare, one)
    assert (place(there, [one], Spares()).targets == {one.uid: "spare-1"}) is fits
    less = replace(spare, memory_free_bytes=2 * GIB - 1)
    assert not place(replace(there, nodes={**there.nodes, "spare-1": less}), [one], Spares()).targets


def test_target_has_at_least_as_many_gpus_as_the_source() -> None:
    """As preflight demands (gpu-present). A rank without a GPU may go anywhere."""
    one, plain = rank(0, "node-1", gpus=(0,)), rank(1, "node-1")
    there = world(node("node-1", 2), node("spare-1", 1), one, plain)
    placed = place(there, [one, plain], Spares())
    assert placed.targets == {plain.uid: "spare-1"}
    assert "spare-1: has fewer GPUs than node-1" in place(there, [one], Spares()).reason


def test_rack_is_preferred_or_required() -> None:
    one = rank(0, "node-1", gpus=(0,))
    near = node("spare-2", 1, labels={"spare": "dedicated", "rack": "a"})
    far = node("spare-1", 1, labels={"spare": "dedicated", "rack": "b"})
    home = node("node-1", 1, labels={"rack": "a"})
    assert place(world(home, near, far, one), [one], Spares()).targets == {one.uid: "spare-2"}
    assert place(world(home, far, one), [one], Spares()).targets == {one.uid: "spare-1"}
    assert place(world(home, far, one), [one], Spares(rack="require")).targets == {}


def test_floating_spares_come_after_dedicated_ones() -> None:
    one = rank(0, "node-1", gpus=(0,))
    other = node("node-2", 1, gpus=(gpu("node-2", 0),))
    assert place(world(node("node-1", 1), other, one), [one], Spares()).targets == {}
    assert place(world(node("node-1", 1), other, one), [one], Spares(floating=True)).targets == {one.uid: "node-2"}
    both = place(world(node("node-1", 1), other, node("spare-1", 1), one), [one], Spares(floating=True))
    assert both.targets == {one.uid: "spare-1"}


def test_what_an_intended_move_takes_is_taken() -> None:
    one, other = rank(0, "node-1", gpus=(0,)), rank(1, "node-2", gpus=(0,))
    coming = move(other, "spare-1", MoveState.INTENDED, gpus=1)
    assert place(world(node("node-1", 1), node("spare-1", 1), one, coming), [one], Spares()).targets == {}
    assert place(world(node("node-1", 1), node("spare-1", 2), one, coming), [one], Spares()).targets


def test_named_target_need_not_be_a_spare() -> None:
    one = rank(0, "node-1")
    there = world(node("node-1"), node("node-2"), node("spare-1"), one)
    assert place(there, [one], Spares(), only=["node-2"]).targets == {one.uid: "node-2"}


def test_gpu_that_its_node_does_not_list_fits_nowhere() -> None:
    one = replace(rank(0, "node-1"), gpus=("GPU-strange",))
    assert place(world(node("node-1", 1), node("spare-1", 8), one), [one], Spares()).targets == {}


def test_free_spares_say_why_they_cannot_be_used() -> None:
    there = world(node("node-1", 1), node("spare-1", 2), node("spare-2", 1, state=NodeState.TAINTED))
    assert free_spares(there, Spares()) == {"spare-1": (2, ""), "spare-2": (1, "is tainted")}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 600)), max_size=4),
    st.sampled_from(["prefer", "require"]),
)
def test_no_gpu_and_no_memory_is_promised_twice(
    needs: list[tuple[int, int]], spares: list[tuple[int, int]], gang: str
) -> None:
    ranks, used = [], 0
    for number, (gpus, memory) in enumerate(needs):
        indices = tuple(range(used, used + gpus))
        ranks.append(rank(number, "node-1", gpus=indices, memory_bytes=memory * GIB))
        used += gpus
    names = [f"spare-{n}" for n in range(len(spares))]
    nodes = [
        node(name, gpus=part(name, max(used, free), free), driver="580.1", memory_free_bytes=m * GIB)
        for name, (free, m) in zip(names, spares, strict=True)
    ]
    placed = place(world(node("node-1", used), *nodes, *ranks), ranks, Spares(gang=gang)).targets
    for spare in nodes:
        there = [one for one in ranks if placed.get(one.uid) == spare.name]
        assert sum(len(one.gpus) for one in there) <= sum(card.free for card in spare.gpus)
        assert sum(one.memory_bytes for one in there) <= spare.memory_free_bytes
    if gang == "require":
        assert not placed or (len(placed) == len(ranks) and len(set(placed.values())) == 1)
