"""Ranks of lower priority make room: only where they can go themselves, one step deep, and the freed place is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank, about_ranks, intended, proposed, with_move
from migrator.autopilot.model import Move, MoveState, Node, NodeState, Order, Proposal, ProposalState, Rank
from migrator.autopilot.policy import Policy
from migrator.autopilot.world import World
from snapshotd.api.errors import Unreachable
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import alerts, results, running, until
from tests.autopilot.worlds import GIB, NOW, TAINTED, acting, alarm, gpu, move, node, rank, world
from tests.cli.conftest import Migrator, a_rank
from tests.sampling import DRAWN, examples

#: Two GPUs that fail on node-1. node-2 has two, one of them used by `low`. spare-1 has two, one of them used by others.
BIG = rank(3, "node-1", "gpt", gpus=(0, 1))
LOW = rank(0, "node-2", "low", gpus=(0,))
HALF = (gpu("node-2", 0, free=False), gpu("node-2", 1))
HALF_FREE = node("node-2", gpus=HALF, driver="580.1")
PARTS: tuple[Any, ...] = (
    node("node-1", 2, state=TAINTED),
    HALF_FREE,
    node("spare-1", gpus=(gpu("spare-1", 0), gpu("spare-1", 1, free=False)), driver="580.1"),
    alarm("node-1"),
    BIG,
    LOW,
)


def policy(preempt: str = "move", **tables: Any) -> Policy:
    jobs = [*tables.pop("jobs", []), {"job": "gpt", "priority": 10}]
    return acting(spares={"preempt": preempt, **tables.pop("spares", {})}, jobs=jobs, **tables)


def decided(there: World, by: Policy) -> dict[str, AboutRank]:
    return {about.rank.job: about for about in about_ranks(there, by, NOW)}


def after(there: World, about: AboutRank, *, asked_s_ago: float = 0.0, gone: bool = True) -> World:
    """The world after that move has ended, as the nodes say it."""
    made = replace(intended(there, about, "m-1", NOW - 20), state=MoveState.MOVED, ended_unix_s=NOW - 10)
    left = [one for one in there.ranks if one.uid != about.rank.uid]
    arrived = replace(about.rank, node=about.target, gpus=(f"GPU-{about.target}-0",))
    nodes = {
        name: replace(
            one,
            asked_unix_s=NOW - asked_s_ago,
            gpus=tuple(
                replace(g, free=True)
                if gone and g.uuid in about.rank.gpus
                else replace(g, free=g.free and name != about.target)
                for g in one.gpus
            ),
        )
        for name, one in there.nodes.items()
    }
    return replace(there, nodes=nodes, ranks=(*left, arrived), moves=(*there.moves, made))


def test_by_default_nothing_makes_room() -> None:
    found = decided(world(*PARTS), policy("never"))
    assert (set(found), found["gpt"].decision) == ({"gpt"}, RankDecision.ALERT)


def test_lower_priority_leaves_first_and_then_the_rank_takes_its_place() -> None:
    there = world(*PARTS)
    found = decided(there, policy())
    assert (found["low"].decision, found["low"].target) == (RankDecision.MOVE, "spare-1")
    assert found["low"].reason.startswith("moved out of the way for rank 3 of gpt (priority 10 > 0); spare-1 has room")
    assert (found["gpt"].decision, "rank 0 of low must leave node-2 first" in found["gpt"].reason) == (
        RankDecision.WAIT,
        True,
    )
    # While it moves, nothing else is done.
    meanwhile = decided(with_move(there, found["low"], "m-1", NOW), policy())
    assert [one.decision for one in meanwhile.values()] == [RankDecision.WAIT]
    # And then, also after a restart: everything is in the world.
    done = after(there, found["low"])
    (about,) = about_ranks(done, policy(), NOW)
    assert (about.rank.job, about.decision, about.target) == ("gpt", RankDecision.MOVE, "node-2")
    assert "room was made for it on node-2" in about.reason


def test_freed_place_that_does_not_show_yet_is_waited_for() -> None:
    there = world(*PARTS)
    done = after(there, decided(there, policy())["low"], asked_s_ago=15, gone=False)
    other = node("node-3", gpus=(gpu("node-3", 0, free=False), gpu("node-3", 1)), driver="580.1")
    more = (rank(0, "node-3", "low2", gpus=(0,)),)
    other_spare = node("spare-2", gpus=(gpu("spare-2", 0), gpu("spare-2", 1, free=False)), driver="580.1")
    done = replace(done, nodes={**done.nodes, "node-3": other, "spare-2": other_spare}, ranks=(*done.ranks, *more))
    (about,) = about_ranks(done, policy(), NOW)
    assert (about.decision, about.look_at) == (RankDecision.WAIT, "node-2")


def test_freed_place_is_kept_from_ranks_of_the_same_and_lower_priority() -> None:
    there = world(*PARTS)
    done = after(there, decided(there, policy())["low"])
    late = rank(1, "node-4", "late", gpus=(0,))
    done = replace(
        done,
        nodes={**done.nodes, "node-4": node("node-4", 1, state=TAINTED)},
        ranks=(*done.ranks, late),
        alarms=(*done.alarms, alarm("node-4", check="other")),
    )
    # The rank itself has to wait for another one of its job: its place must still be there afterwards.
    busy = move(rank(4, "node-9", "gpt"), "node-8", MoveState.INTENDED)
    done = replace(done, moves=(*done.moves, busy))
    found = decided(done, policy(spares={"preempt": "move", "floating": True}))
    assert found["gpt"].decision is RankDecision.WAIT
    assert (found["late"].decision, found["late"].target) == (RankDecision.ALERT, "")
    vip = policy(spares={"preempt": "move", "floating": True}, jobs=[{"job": "late", "priority": 11}])
    assert decided(done, vip)["late"].target == "node-2", "a higher priority gets it"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"jobs": [{"job": "low", "priority": 10}]}, "no rank of a lower priority can make room"),
        ({"jobs": [{"job": "low", "move": False}]}, "no rank of a lower priority can make room"),
        ({"spares": {"gang": "require"}}, "no node can take it"),
        ({"breaker": {"nodes_percent": 50, "moves": 1}}, "the policy allows 1"),
    ],
)
def test_what_the_policy_forbids_is_not_done(change: dict[str, Any], reason: str) -> None:
    found = decided(world(*PARTS), policy(**change))
    assert (set(found), found["gpt"].decision) == ({"gpt"}, RankDecision.ALERT)
    assert reason in found["gpt"].reason


@pytest.mark.parametrize(
    "part",
    [
        node("spare-1", 2, state=NodeState.SUSPECT),
        node("spare-1", 2, driver="570"),
        node("spare-1", 1),
        node("spare-1", gpus=(gpu("spare-1", 0, free=False),) * 2, driver="580.1"),
        node("spare-1", 2, labels={"spare": "dedicated", "network": "b"}),
    ],
)
def test_rank_that_has_nowhere_to_go_stays(part: Any) -> None:
    found = decided(world(*PARTS, part), policy())
    assert (set(found), found["gpt"].decision) == ({"gpt"}, RankDecision.ALERT)
    assert "rank 0 of low on node-2 cannot make room: no node can take it" in found["gpt"].reason


def test_displaced_rank_displaces_nobody() -> None:
    """low could only leave if lowest left spare-1 for spare-2: that would be two displacements."""
    lowest = rank(0, "spare-1", "lowest", gpus=(0,))
    taken = node("spare-1", gpus=(gpu("spare-1", 0, free=False), gpu("spare-1", 1, free=False)), driver="580.1")
    other = node("spare-2", gpus=(gpu("spare-2", 0), gpu("spare-2", 1, free=False)), driver="570")
    jobs = [{"job": "low", "priority": 5}, {"job": "lowest", "priority": 1}]
    found = decided(world(*PARTS, taken, other, lowest), policy(jobs=jobs))
    assert set(found) == {"gpt"}


def test_rank_that_was_moved_just_now_is_left_alone_also_under_an_order() -> None:
    before = replace(move(replace(LOW, node="node-9"), "node-2", MoveState.MOVED, 60), makes_room_for="")
    assert set(decided(world(*PARTS, before), policy())) == {"gpt"}
    order = Order(5, "evacuate", "node-1", by="alice", since_unix_s=NOW)
    assert set(decided(world(*PARTS, before, order), policy())) == {"gpt"}
    found = decided(world(*PARTS, order), policy())
    assert (found["low"].decision, found["low"].why.order) == (RankDecision.MOVE, 5)
    fixed = policy(jobs=[{"job": "low", "move": False}])
    assert set(decided(world(*PARTS, order), fixed)) == {"gpt"}, "evacuate overrules only the jobs of its node"


def test_breaker_holds_for_ranks_that_an_order_displaces() -> None:
    """Three ranks are drained from node-1, and each needs the place of another one."""
    bigs = [rank(n, "node-1", "gpt", gpus=(2 * n, 2 * n + 1)) for n in range(3)]
    order = Order(7, "drain", "node-1", by="alice", since_unix_s=NOW - 10)
    parts: list[Any] = [node("node-1", 6, state=NodeState.DRAINING), *bigs, order]
    for number, name in enumerate("abc"):
        spare, low = f"spare-{number}", rank(number, name, f"low{number}", gpus=(0,))
        half = tuple(gpu(name, n, free=n == 1) for n in range(6))
        parts += [node(name, gpus=half, driver="580.1"), low]
        parts.append(node(spare, gpus=tuple(gpu(spare, n, free=n == 0) for n in range(6)), driver="580.1"))

    def leaving(moves: int, *more: Any) -> list[str]:
        by = policy(jobs=[{"job": "gpt", "priority": 10, "independent": True}], breaker={"moves": moves})
        found = about_ranks(world(*parts, *more), by, NOW)
        return [one.rank.job for one in found if one.decision is RankDecision.MOVE]

    assert leaving(9) == ["low0", "low1", "low2"]
    assert leaving(2) == ["low0"]
    gone = rank(8, "node-7", "gone")
    before = [move(gone, "spare-9", MoveState.MOVED, 60, order=6, makes_room_for="other") for _ in range(2)]
    assert leaving(2, *before) == []
    assert leaving(2, *(replace(one, makes_room_for="") for one in before)) == ["low0"], (
        "those of an order do not count"
    )


@pytest.mark.parametrize("targets", [(), ("node-2",)])
def test_order_to_move_one_rank_displaces_nobody(targets: tuple[str, ...]) -> None:
    """Nothing is wrong where the rank is, so others need not leave for it."""
    order = Order(3, "move", "node-1", targets, by="alice", since_unix_s=NOW - 1, rank_uid=BIG.uid)
    found = decided(world(node("node-1", 2), *PARTS[1:3], BIG, LOW, order), policy())
    assert {job: one.decision for job, one in found.items()} == {"gpt": RankDecision.ALERT}


def test_displacement_is_planned_and_no_failure() -> None:
    there = world(*PARTS)
    found = decided(there, policy())
    assert found["gpt"].why.cause_class == "hardware"
    assert intended(there, found["low"], "m-1", NOW).cause_class == "planned"


@pytest.mark.parametrize("on_host", [True, False])
def test_device_memory_of_a_rank_that_leaves_makes_no_room_on_the_host(on_host: bool) -> None:
    full = replace(HALF_FREE, memory_free_bytes=0)
    low = replace(LOW, memory_bytes=2 * GIB if on_host else 0, device_bytes=0 if on_host else 2 * GIB)
    found = decided(world(PARTS[0], full, *PARTS[2:5], low), policy())
    assert set(found) == ({"gpt", "low"} if on_host else {"gpt"})


def test_fewest_ranks_leave_and_one_of_a_job_at_a_time() -> None:
    full = tuple(gpu("node-2", number, free=False) for number in range(4))
    lows = [rank(number, "node-2", "low", gpus=(number,)) for number in range(3)]
    high = rank(0, "node-2", "high", gpus=(3,))
    spares = [
        node(name, gpus=tuple(gpu(name, number, free=not number) for number in range(4)), driver="580.1")
        for name in ("spare-1", "spare-2")
    ]
    parts = (
        *PARTS[:4],
        BIG,
        node("node-2", gpus=full, driver="580.1"),
        *spares,
        *lows,
        high,
    )
    by = policy(jobs=[{"job": "high", "priority": 20}])
    found = about_ranks(world(*parts), by, NOW)
    assert [(one.rank.job, one.rank.rank, one.decision.value) for one in found] == [
        ("low", 0, "move"),
        ("low", 1, "wait"),
        ("gpt", 3, "wait"),
    ]
    free = policy(jobs=[{"job": "high", "priority": 20}, {"job": "low", "independent": True}])
    both = about_ranks(world(*parts), free, NOW)
    assert [one.decision.value for one in both] == ["move", "move", "wait"]
    assert {one.target for one in both[:2]} == {"spare-1", "spare-2"}
    # The first one has left, the second one follows, and no other one.
    done = after(world(*parts), found[0])
    later = about_ranks(done, by, NOW)
    assert [(one.rank.job, one.rank.rank, one.decision.value) for one in later] == [
        ("low", 1, "move"),
        ("gpt", 3, "wait"),
    ]


# ---------------------------------------------------------------------- proposals


def answered(proposal: Proposal, state: ProposalState) -> Proposal:
    return replace(proposal, id=7, state=state, by="alice")


def test_proposal_is_made_and_only_its_approval_moves_something() -> None:
    there, by = world(*PARTS), policy("propose")
    found = decided(there, by)
    assert (set(found), found["gpt"].decision) == ({"gpt"}, RankDecision.ALERT)
    (proposal,) = proposed(there, by, found.values(), NOW).values()
    assert proposal.what == "move rank 0 of low from node-2 to spare-1, and then rank 3 of gpt from node-1 to node-2"
    approved = replace(there, proposals=(answered(proposal, ProposalState.APPROVED),))
    assert decided(approved, by)["low"].decision is RankDecision.MOVE
    rejected = replace(there, proposals=(answered(proposal, ProposalState.REJECTED),))
    found = decided(rejected, by)
    assert (set(found), "an operator has rejected it" in found["gpt"].reason) == ({"gpt"}, True)
    assert [one.state for one in proposed(rejected, by, found.values(), NOW).values()] == [ProposalState.REJECTED]
    # An approval holds while the ranks leave one after the other, and ends when the rank need not leave any more.
    moving = with_move(approved, decided(approved, by)["low"], "m-1", NOW)
    assert len(proposed(moving, by, about_ranks(moving, by, NOW), NOW)) == 1
    calm = replace(moving, alarms=())
    assert proposed(calm, by, about_ranks(calm, by, NOW), NOW) == {}


# ---------------------------------------------------------------------- with fake daemons


def crowd(pilots: PilotCluster) -> None:
    """gpt on node-1 fits only on node-2, and only without low, which fits on spare-1."""
    for name, room in (("node-2", 110), ("node-3", 20), ("spare-1", 50), ("spare-2", 20)):
        pilots[name].room_bytes = room * GIB
    pilots["node-1"].ranks.append(a_rank("node-1", 3, "gpt", memory_bytes=100 * GIB))
    pilots["node-2"].ranks.append(a_rank("node-2", 0, "low", memory_bytes=30 * GIB))


MOVED = {"gpt-3-00000001": "node-2", "low-0-00000001": "spare-1"}


async def test_autopilot_moves_a_rank_out_of_the_way_and_another_into_its_place(pilots: PilotCluster) -> None:
    crowd(pilots)
    async with running(pilots, policy(breaker={"nodes_percent": 80})) as store:
        pilots["node-1"].raise_alarm()
        assert await results(store, 2) == [("spare-1", "moved"), ("node-2", "moved")]
        first, second = (await store.load()).moves
    assert "moved out of the way for rank 3 of gpt (priority 10 > 0)" in first.reason
    assert "room was made for it on node-2" in second.reason
    assert (pilots.places(), pilots.begun()) == (MOVED, 2)


async def test_autopilot_killed_between_the_two_moves_goes_on(pilots: PilotCluster) -> None:
    crowd(pilots)
    by = policy(breaker={"nodes_percent": 80})
    pilots["node-1"].failures["Begin"] = Unreachable("it is slow")  # so that the second move cannot be made yet
    async with running(pilots, by) as store:
        pilots["node-1"].raise_alarm()
        await results(store, 1)
    pilots["node-1"].failures.clear()
    assert pilots.places()["low-0-00000001"] == "spare-1"
    again = msgspec.structs.replace(by, breaker=msgspec.structs.replace(by.breaker, back_off_s=0))
    async with running(pilots, again) as store:

        async def arrived() -> bool:
            return pilots.places() == MOVED

        await until("both ranks to be in place", arrived)
        displaced = [one.rank for one in (await store.load()).moves if one.makes_room_for]
    assert displaced == [0], "nobody else was moved for it"


async def test_operator_approves_the_displacement(pilots: PilotCluster) -> None:
    crowd(pilots)
    async with running(pilots, policy("propose", breaker={"nodes_percent": 80})) as store:
        pilots["node-1"].raise_alarm()
        assert "move rank 0 of low from node-2 to spare-1" in await alerts(store, "approve 1`")
        assert pilots.begun() == 0
        await store.answer_proposal(1, True, "alice")
        assert await results(store, 2) == [("spare-1", "moved"), ("node-2", "moved")]
        asked = [record.text for record in await store.events() if record.kind.startswith("proposal")]
    assert asked[1].startswith("alice approved proposal 1: move rank 0 of low from node-2")
    assert len([text for text in asked if "approved" in text]) == 1


def test_drain_displaces_and_says_so(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    crowd(pilots)
    file = tmp_path / "policy.toml"
    file.write_text('[spares]\npreempt = "move"\n[[jobs]]\njob = "gpt"\npriority = 10\n')
    plan = migrator("drain", "node-1", "--policy", str(file), "--dry-run", "--json").json["ranks"]
    assert [(one["job"], one["target"], one["decision"]) for one in plan] == [
        ("low", "spare-1", "move"),
        ("gpt", "", "wait"),
    ]
    ran = migrator("drain", "node-1", "--policy", str(file), "--json")
    assert (ran.code, ran.json["summary"]) == (0, "1 rank moved; 1 of lower priority moved out of the way")
    assert pilots.places() == MOVED


# ---------------------------------------------------------------------- all worlds


@st.composite
def crowded(draw: st.DrawFn) -> World:
    names = ["node-1", "node-2", "node-3", "spare-1", "spare-2"]
    nodes: list[Node] = []
    ranks: list[Rank] = []
    for name in names:
        count = 3
        used = draw(st.integers(0, count))
        state = TAINTED if name == "node-1" else draw(st.sampled_from([NodeState.HEALTHY] * 4 + [NodeState.SUSPECT]))
        cards = tuple(gpu(name, number, free=number >= used) for number in range(count))
        nodes.append(node(name, gpus=cards, driver="580.1", state=state, asked_unix_s=NOW))
        number = 0
        while number < used:
            width = min(draw(st.integers(1, 2)), used - number)
            job = draw(st.sampled_from(["gpt", "mid", "low", "fixed"]))
            owned = tuple(range(number, number + width))
            ranks.append(replace(rank(len(ranks), name, job, gpus=owned), memory_bytes=draw(st.integers(1, 300)) * GIB))
            number += width
    return world(*nodes, *ranks, alarm("node-1"))


@settings(DRAWN, max_examples=examples(1600))
@given(crowded())
def test_every_displacement_is_safe(there: World) -> None:
    by = policy(
        jobs=[{"job": "mid", "priority": 5}, {"job": "fixed", "move": False}], breaker={"nodes_percent": 50, "moves": 9}
    )
    decisions = about_ranks(there, by, NOW)
    by_uid: dict[str, Rank] = {one.uid: one for one in there.ranks}
    moves: list[Move] = [intended(there, one, "m", NOW) for one in decisions if one.decision is RankDecision.MOVE]
    assert len({one.rank_uid for one in moves}) == len(moves)
    for one in moves:
        target = there.nodes[one.target]
        assert target.state is NodeState.HEALTHY
        if not one.makes_room_for:
            continue
        high = by_uid[one.makes_room_for]
        assert by.job_for(high).priority > by.job_for(by_uid[one.rank_uid]).priority
        assert by_uid[one.rank_uid].job != "fixed"
        assert high.node == "node-1"
        assert target.dedicated
        assert one.source != "node-1"
    for target in there.nodes.values():
        assert sum(one.gpus for one in moves if one.target == target.name) <= sum(card.free for card in target.gpus)
