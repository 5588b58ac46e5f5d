"""Jobs of lower priority are suspended for a rank only if nothing else helps, and resumed if there is room for all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank, about_ranks
from migrator.autopilot.limits import move_brake
from migrator.autopilot.model import MoveState, NodeState, Rank
from migrator.autopilot.policy import Policy
from migrator.autopilot.suspending import to_resume
from migrator.autopilot.suspension import Suspension, SuspensionState
from migrator.autopilot.world import World
from tests.autopilot.worlds import GIB, NOW, TAINTED, acting, alarm, gpu, move, node, rank, world

#: The GPU of node-1 fails. Those of all others are in use: on node-2 by `other`, on spare-1 and node-3 by the job `low`.
GPT = rank(3, "node-1", "gpt", gpus=(0,))
LOW = (rank(0, "spare-1", "low", gpus=(0,)), rank(1, "node-3", "low", gpus=(0,)))
OTHER = rank(0, "node-2", "other", gpus=(0,))
FULL: dict[str, Any] = {"gpus": (gpu("spare-1", 0, free=False),), "driver": "580.1"}
PARTS: tuple[Any, ...] = (
    node("node-1", 1, state=TAINTED),
    node("node-2", 1),
    node("node-3", 1),
    node("spare-1", **FULL),
    alarm("node-1"),
    GPT,
    OTHER,
    *LOW,
)


def policy(preempt: str = "suspend", **tables: Any) -> Policy:
    jobs = [*tables.pop("jobs", []), {"job": "gpt", "priority": 10}, {"job": "other", "priority": 10}]
    return acting(spares={"preempt": preempt, **tables.pop("spares", {})}, jobs=jobs, **tables)


def decided(there: World, by: Policy) -> AboutRank:
    (about,) = about_ranks(there, by, NOW)
    return about


def suspension(state: SuspensionState = SuspensionState.SUSPENDED, **values: Any) -> Suspension:
    """That of `low`, which was suspended 60 s ago."""
    planned = decided(world(*PARTS), policy()).suspends
    assert planned is not None
    times = {"intended_unix_s": NOW - 65, "suspended_unix_s": NOW - 60}
    return replace(planned, **{"id": "m-1", "state": state, **times, **values})


def suspended(there: World, *more: Suspension) -> World:
    """The world in which `low` is suspended, and nodes say so."""
    nodes = {
        name: replace(one, gpus=tuple(replace(g, free=name in ("spare-1", "node-3")) for g in one.gpus))
        for name, one in there.nodes.items()
    }
    ranks = tuple(one for one in there.ranks if one.job != "low")
    return replace(there, nodes=nodes, ranks=ranks, suspensions=more or (suspension(),))


def test_whole_job_is_suspended_if_no_rank_can_be_moved_out_of_the_way() -> None:
    about = decided(world(*PARTS), policy())
    assert about.decision is RankDecision.WAIT
    assert "job low must be suspended first" in about.reason
    job = about.suspends
    assert job is not None
    assert (job.job, job.node, job.makes_room_for) == ("low", "spare-1", GPT.uid)
    assert job.reason == "suspended to make room for rank 3 of gpt (priority 10 > 0)"
    assert [(one.rank, one.node, len(one.gpus), one.memory_bytes) for one in job.ranks] == [
        (0, "spare-1", 1, GIB),
        (1, "node-3", 1, GIB),
    ]


def test_nothing_is_suspended_if_moving_helps_or_the_policy_does_not_say_so() -> None:
    for preempt in ("never", "propose", "move"):
        assert decided(world(*PARTS), policy(preempt)).suspends is None
    room = node("spare-2", 1)
    about = decided(world(*PARTS, room), policy())
    assert (about.decision, about.target) == (RankDecision.MOVE, "spare-2")
    assert decided(world(*PARTS), policy().without_suspending()).suspends is None
    assert policy("move").without_suspending().spares.preempt == "move"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"jobs": [{"job": "low", "priority": 10}]}, "no job of a lower priority can be suspended"),
        ({"jobs": [{"job": "low", "move": False}]}, "low: the policy excludes it from moves"),
        ({"breaker": {"nodes_percent": 50, "moves": 1}}, "no job can be suspended: 0 moves were begun"),
    ],
)
def test_what_the_policy_forbids_is_not_done(change: dict[str, Any], reason: str) -> None:
    about = decided(world(*PARTS), policy(**change))
    assert (about.decision, about.suspends) == (RankDecision.ALERT, None)
    assert reason in about.reason


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (node("node-3", 1, reachable=False), "low: node-3 does not answer"),
        (move(LOW[1], "spare-9", MoveState.INTENDED), "low: one of its ranks is being moved"),
        (replace(LOW[1], moving="m-9"), "low: one of its ranks is being moved"),
        (replace(LOW[1], rank=2, uid="low-2"), "low: not all of its ranks are known"),
    ],
)
def test_job_that_cannot_be_suspended_as_a_whole_stays(part: Any, reason: str) -> None:
    left = [one for one in PARTS if not (isinstance(part, Rank) and one is LOW[1])]
    about = decided(world(*left, part), policy())
    assert (about.decision, about.suspends) == (RankDecision.ALERT, None)
    assert reason in about.reason


def test_lowest_priority_is_suspended_and_then_the_smallest_job() -> None:
    lowest = rank(0, "node-4", "lowest", gpus=(0,))
    small = rank(0, "node-5", "small", gpus=(0,))
    parts = (*PARTS, node("node-4", 1), node("node-5", 1), lowest, small)
    for jobs, chosen in ([{"job": "lowest", "priority": -1}], "lowest"), ([{"job": "lowest", "priority": 1}], "small"):
        job = decided(world(*parts), policy(jobs=jobs)).suspends
        assert job is not None
        assert job.job == chosen


def test_one_suspension_at_a_time_and_it_counts_for_the_limits() -> None:
    second = rank(4, "node-1", "gpt2", gpus=(0,))
    small = rank(0, "node-5", "small", gpus=(0,))
    there = world(*PARTS, second, node("node-5", 1), small)
    by = policy(jobs=[{"job": "gpt2", "priority": 9}])
    found = {about.rank.job: about for about in about_ranks(there, by, NOW)}
    assert found["gpt"].suspends is not None
    assert (found["gpt2"].suspends, found["gpt2"].decision) == (None, RankDecision.WAIT)
    assert "is being suspended or resumed" in found["gpt2"].reason
    limited = policy(breaker={"moves": 2})
    assert move_brake(there, limited, NOW, 1) == ""
    assert "1 jobs suspended" in move_brake(suspended(there), limited, NOW, 1)


def test_freed_place_is_taken_by_the_rank_and_by_no_other() -> None:
    late = rank(0, "node-4", "late", gpus=(0,))
    there = world(*PARTS, node("node-4", 1, state=TAINTED), alarm("node-4", check="other"), late)
    found = {about.rank.job: about for about in about_ranks(suspended(there), policy(), NOW)}
    assert (found["gpt"].decision, found["gpt"].target) == (RankDecision.MOVE, "spare-1")
    assert "room was made for it on spare-1" in found["gpt"].reason
    assert (found["late"].target, found["late"].suspends) == ("", None)


def test_second_job_is_not_suspended_for_the_same_rank() -> None:
    small = rank(0, "node-5", "small", gpus=(0,))
    there = suspended(world(*PARTS, node("node-5", 1), small))
    taken = {**there.nodes, "spare-1": replace(there.nodes["spare-1"], gpus=FULL["gpus"])}
    about = decided(replace(there, nodes=taken), policy())
    assert (about.decision, about.suspends) == (RankDecision.ALERT, None)
    assert "job low was suspended for it already, and spare-1 has no room" in about.reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"state": SuspensionState.RESUMED, "ended_unix_s": NOW - 10}, "within the window of the policy"),
        ({"state": SuspensionState.OVER, "ended_unix_s": NOW - 10}, "within the window of the policy"),
        ({"state": SuspensionState.NOT_SUSPENDED, "ended_unix_s": NOW - 10}, "the last attempt has just failed"),
    ],
)
def test_job_is_not_suspended_again_at_once(values: dict[str, Any], reason: str) -> None:
    before = suspension(makes_room_for="another", **values)
    about = decided(replace(world(*PARTS), suspensions=(before,)), policy())
    assert about.suspends is None
    assert reason in about.reason


def test_after_three_failed_attempts_none_is_made_within_the_window() -> None:
    values: dict[str, Any] = {"state": SuspensionState.NOT_SUSPENDED, "ended_unix_s": NOW - 1000}
    failed = tuple(suspension(id=f"m-{number}", **values) for number in range(3))
    assert "3 attempts have failed" in decided(replace(world(*PARTS), suspensions=failed), policy()).reason
    assert decided(replace(world(*PARTS), suspensions=failed[:2]), policy()).suspends is not None


# ---------------------------------------------------------------------- resuming


def taken(there: World) -> World:
    """`gpt` is on spare-1 now."""
    nodes = {**there.nodes, "spare-1": replace(there.nodes["spare-1"], gpus=FULL["gpus"])}
    return replace(there, nodes=nodes, ranks=(replace(GPT, node="spare-1", gpus=("GPU-spare-1-0",)), OTHER), alarms=())


def resumed(there: World, by: Policy, **more: Any) -> tuple[dict[str, str], str]:
    (one,) = there.suspensions
    targets, reason = to_resume(there, by, one, NOW, **more)
    return {uid[:5]: name for uid, name in targets.items()}, reason


def test_job_is_resumed_if_all_its_ranks_have_room() -> None:
    there = taken(suspended(world(*PARTS)))
    assert resumed(there, policy()) == ({}, "no node has room for rank 0"), "all or nothing: node-3 is free"
    room = replace(there, nodes={**there.nodes, "spare-2": node("spare-2", 1)})
    assert resumed(room, policy()) == (
        {"low-0": "spare-2", "low-1": "node-3"},
        "spare-2, node-3 have room for all its ranks",
    )
    assert resumed(room, policy(), first="rank 3 of gpt")[0] == {}
    old = suspended(world(*PARTS))
    assert resumed(old, policy())[0] == {"low-0": "spare-1", "low-1": "node-3"}, "where they were"


@pytest.mark.parametrize(
    "fields",
    [
        {"state": NodeState.SUSPECT},
        {"driver": "570"},
        {"labels": {}},
        {"labels": {"spare": "dedicated", "network": "b"}},
        {"gpus": (gpu("spare-2", 0, model="NVIDIA A100"),)},
        {"memory_free_bytes": 1},
        {"maintenance": "tomorrow"},
        {"reachable": False},
    ],
)
def test_node_that_does_not_suit_a_rank_is_not_used(fields: dict[str, Any]) -> None:
    there = taken(suspended(world(*PARTS)))
    room = replace(there, nodes={**there.nodes, "spare-2": node("spare-2", 1, **fields)})
    assert resumed(room, policy()) == ({}, "no node has room for rank 0")


def test_node_without_the_label_is_used_only_if_it_floats_or_the_rank_was_started_there() -> None:
    there = taken(suspended(world(*PARTS)))
    nodes = {**there.nodes, "node-2": replace(there.nodes["node-2"], gpus=(gpu("node-2", 0),))}
    free = replace(there, nodes=nodes)
    assert resumed(free, policy())[0] == {}
    assert resumed(free, policy(spares={"floating": True}))[0] == {"low-0": "node-2", "low-1": "node-3"}
    (one,) = free.suspensions
    home = replace(one, ranks=tuple(replace(rank, home="node-2") for rank in one.ranks))
    assert resumed(replace(free, suspensions=(home,)), policy())[0] == {"low-0": "node-2", "low-1": "node-3"}


def test_failed_resumption_is_tried_again_later_and_later() -> None:
    for failures, waits_s in (1, 300), (2, 600), (9, 2400):
        there = suspended(world(*PARTS), suspension(failures=failures, failed_unix_s=NOW - waits_s + 5, result="full"))
        assert resumed(there, policy()) == ({}, "it could not be resumed: full; retry in 5 s")
        there = suspended(world(*PARTS), suspension(failures=failures, failed_unix_s=NOW - waits_s))
        assert resumed(there, policy())[0]


def test_image_on_a_node_that_does_not_answer_is_waited_for() -> None:
    there = suspended(world(*PARTS, node("node-3", 1, reachable=False)))
    assert resumed(there, policy()) == ({}, "node-3, which has the image of rank 1, does not answer")


def test_what_is_being_resumed_takes_its_room() -> None:
    there = suspended(world(*PARTS, node("spare-2", 1)))
    (one,) = there.suspensions
    ranks = tuple(replace(rank, target=to) for rank, to in zip(one.ranks, ("spare-2", "node-3"), strict=True))
    there = replace(there, suspensions=(replace(one, state=SuspensionState.RESUMING, ranks=ranks),))
    about = decided(there, policy())
    assert about.target == "spare-1", "not spare-2, although it has said that its GPU is free"


def test_node_where_a_rank_has_just_arrived_is_asked_again_first() -> None:
    there = suspended(world(*PARTS))
    arrived = move(GPT, "spare-1", MoveState.MOVED, 1)
    nodes = {name: replace(one, asked_unix_s=NOW - 0.5) for name, one in there.nodes.items()}
    assert resumed(replace(there, nodes=nodes, moves=(arrived,)), policy())[0] == {}
