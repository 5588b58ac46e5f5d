"""The decisions: a page of pure functions, one test for each line of it, and properties that hold for every world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.autopilot.decide import NodeDecision, NodeFacts, RankDecision, RankFacts, node_next, rank_next
from migrator.autopilot.facts import about_node, about_ranks
from migrator.autopilot.limits import systematic
from migrator.autopilot.model import FAILED, Action, MoveState, Node, NodeState, Order, Severity
from migrator.autopilot.policy import Policy
from migrator.autopilot.ruled import ruled
from migrator.autopilot.world import World
from tests.autopilot.worlds import NOW, TAINTED, acting, alarm, move, node, rank, world

S, D = NodeState, NodeDecision


@pytest.mark.parametrize(
    ("facts", "decision", "reason"),
    [
        (NodeFacts(S.HEALTHY), D.KEEP, "nothing is wrong"),
        (NodeFacts(S.HEALTHY, trouble="ecc"), D.SUSPECT, "ecc"),
        (NodeFacts(S.SUSPECT, trouble="ecc"), D.KEEP, "ecc"),
        (NodeFacts(S.SUSPECT), D.CLEAR, "no alarm"),
        (NodeFacts(S.HEALTHY, due=Action.TAINT, cause="r"), D.TAINT, "r"),
        (NodeFacts(S.SUSPECT, due=Action.MOVE, cause="r"), D.TAINT, "r"),
        (NodeFacts(S.RETURNED, due=Action.DRAIN, cause="r"), D.DRAIN, "r"),
        (NodeFacts(S.TAINTED, due=Action.MOVE, cause="r"), D.KEEP, "untaint"),
        (NodeFacts(S.TAINTED, due=Action.DRAIN, cause="r", brake="b"), D.DRAIN, "r"),
        (NodeFacts(S.HEALTHY, due=Action.DRAIN, cause="r", brake="b"), D.ALERT, "b"),
        (NodeFacts(S.HEALTHY, ordered=True, brake="b"), D.DRAIN, "operator"),
        (NodeFacts(S.TAINTED), D.KEEP, "untaint"),
        (NodeFacts(S.DRAINING, ranks=2), D.KEEP, "2 ranks"),
        (NodeFacts(S.DRAINING), D.DRAINED, "no rank is left"),
        (NodeFacts(S.DRAINING, answers=False), D.KEEP, "does not answer"),
        (NodeFacts(S.DRAINED, answers=False), D.REPAIRING, "does not answer"),
        (NodeFacts(S.DRAINED, ranks=1), D.ALERT, "started there since"),
        (NodeFacts(S.DRAINED), D.KEEP, "migrator return"),
        (NodeFacts(S.REPAIRING, trouble="x"), D.KEEP, "migrator return"),
        (NodeFacts(S.VALIDATING, due=Action.DRAIN), D.KEEP, "validation"),
        (NodeFacts(S.RETURNED), D.KEEP, "nothing"),
        (NodeFacts(S.RETURNED, probation_over=True), D.TRUST, "probation"),
        (NodeFacts(S.RETURNED, probation_over=True, trouble="x"), D.SUSPECT, "x"),
    ],
)
def test_node(facts: NodeFacts, decision: NodeDecision, reason: str) -> None:
    found, said = node_next(facts)
    assert (found, reason in said) == (decision, True), said


def leaving(**fields: Any) -> RankFacts:
    return replace(RankFacts(leaves="ecc", target="spare-1", placement="p"), **fields)


@pytest.mark.parametrize(
    ("facts", "decision", "reason"),
    [
        (RankFacts(target="spare-1"), RankDecision.STAY, "nothing is wrong"),
        (leaving(), RankDecision.MOVE, "ecc; p"),
        (leaving(moving="m-1"), RankDecision.WAIT, "m-1"),
        (leaving(node_answers=False), RankDecision.ALERT, "does not answer"),
        (leaving(opted_out=True), RankDecision.ALERT, "excludes"),
        (leaving(job_moves="3"), RankDecision.WAIT, "rank 3"),
        (leaving(moved_s_ago=9, rank_window_s=10), RankDecision.ALERT, "9 s ago"),
        (leaving(moved_s_ago=11, rank_window_s=10), RankDecision.MOVE, ""),
        (leaving(moved_s_ago=9, rank_window_s=10, ordered=True), RankDecision.MOVE, ""),
        (leaving(failures=3), RankDecision.ALERT, "3 moves of it have failed"),
        (leaving(failures=2, back_off_s=5), RankDecision.MOVE, ""),  # to another spare, at once
        (leaving(failures=2, back_off_s=5, target=""), RankDecision.WAIT, "retry in 5 s"),
        (leaving(target=""), RankDecision.ALERT, "ecc, but p"),
        (leaving(brake="b"), RankDecision.ALERT, "b"),
        (leaving(brake="b", ordered=True), RankDecision.MOVE, ""),
        (leaving(ordered=True, opted_out=True), RankDecision.ALERT, "excludes"),
    ],
)
def test_rank(facts: RankFacts, decision: RankDecision, reason: str) -> None:
    found, said = rank_next(facts)
    assert (found, reason in said) == (decision, True), said


# ---------------------------------------------------------------------- from worlds


def decisions(there: World, policy: Policy) -> dict[str, tuple[RankDecision, str]]:
    return {about.rank.uid: (about.decision, about.target) for about in about_ranks(there, policy, NOW)}


def test_only_ranks_on_the_failing_gpu_move() -> None:
    first, second = rank(0, "node-1", gpus=(0,)), rank(1, "node-1", job="other", gpus=(1,))
    there = world(
        node("node-1", 2, state=TAINTED), node("spare-1", 2), first, second, alarm("node-1", subject="gpu:GPU-node-1-0")
    )
    assert decisions(there, acting()) == {first.uid: (RankDecision.MOVE, "spare-1")}


def test_observing_rule_moves_nothing_and_node_becomes_suspect() -> None:
    there = world(node("node-1"), node("spare-1"), rank(0, "node-1"), alarm("node-1"))
    policy = acting("observe")
    assert about_ranks(there, policy, NOW) == []
    assert about_node(there, policy, there.nodes["node-1"], NOW).decision is NodeDecision.SUSPECT


def test_taint_precedes_the_move() -> None:
    there = world(node("node-1"), node("spare-1"), rank(0, "node-1"), alarm("node-1"))
    assert about_ranks(there, acting(), NOW) == []
    assert about_node(there, acting(), there.nodes["node-1"], NOW).decision is NodeDecision.TAINT


def test_operators_taint_alone_moves_nothing() -> None:
    there = world(node("node-1", state=TAINTED), node("spare-1"), rank(0, "node-1"))
    assert about_ranks(there, acting(), NOW) == []


def test_rule_waits_for_age_count_and_hours() -> None:
    def waits(**rule: Any) -> str:
        policy = acting(rules=[{"name": "x", "action": "move", **rule}])
        return ruled(policy, alarm("node-1", count=2), NOW).waits

    assert waits() == ""
    assert "20 s more" in waits(wait_s=120)
    assert "asks for 3" in waits(count=3)
    assert "only at" in waits(hours=["03:00-03:01"])


def test_one_move_per_job_at_a_time_unless_its_ranks_are_independent() -> None:
    first, second = rank(0, "node-1"), rank(1, "node-1")
    there = world(node("node-1", state=TAINTED), node("spare-1"), first, second, alarm("node-1"))
    assert [one for one, _ in decisions(there, acting()).values()] == [RankDecision.MOVE, RankDecision.WAIT]
    free = acting(jobs=[{"job": "train", "independent": True}])
    assert [one for one, _ in decisions(there, free).values()] == [RankDecision.MOVE, RankDecision.MOVE]


def test_higher_priority_gets_the_last_spare() -> None:
    low, high = rank(0, "node-1", job="low", gpus=(0,)), rank(0, "node-2", job="high", gpus=(0,))
    there = world(
        node("node-1", 1, state=TAINTED),
        node("node-2", 1, state=TAINTED),
        node("spare-1", 1),
        low,
        high,
        alarm("node-1"),
        alarm("node-2"),
    )
    policy = acting(jobs=[{"job": "high", "priority": 5}])
    assert decisions(there, policy) == {high.uid: (RankDecision.MOVE, "spare-1"), low.uid: (RankDecision.ALERT, "")}


def test_undone_move_is_tried_with_another_spare_and_not_with_the_same() -> None:
    one = rank(0, "node-1")
    undone = move(one, "spare-1", MoveState.UNDONE, 10)
    parts = (node("node-1", state=TAINTED), node("spare-1"), one, alarm("node-1"), undone)
    assert decisions(world(*parts), acting()) == {one.uid: (RankDecision.WAIT, "")}
    assert decisions(world(*parts, node("spare-2")), acting()) == {one.uid: (RankDecision.MOVE, "spare-2")}
    later = replace(undone, ended_unix_s=NOW - 301)
    assert decisions(world(*parts[:-1], later), acting()) == {one.uid: (RankDecision.MOVE, "spare-1")}


def test_circuit_breaker_counts_moves_of_rules_within_the_window() -> None:
    one = rank(0, "node-1")
    others = [move(rank(n, "node-2", job=f"j{n}"), "spare-1", MoveState.MOVED, 100 + n) for n in range(4)]
    parts = (node("node-1", state=TAINTED), node("spare-1"), one, alarm("node-1"))
    assert decisions(world(*parts, *others), acting())[one.uid][0] is RankDecision.ALERT
    assert decisions(world(*parts, *others[:3]), acting())[one.uid][0] is RankDecision.MOVE
    ordered = [replace(past, order=1) for past in others]
    assert decisions(world(*parts, *ordered), acting())[one.uid][0] is RankDecision.MOVE


def test_share_of_nodes_limits_taints_but_one_is_always_possible() -> None:
    policy = acting(breaker={"nodes_percent": 10})
    healthy = [node(f"node-{n}") for n in range(3)]
    assert about_node(world(*healthy, alarm("node-0")), policy, healthy[0], NOW).decision is NodeDecision.TAINT
    out = node("node-9", state=S.DRAINED)
    about = about_node(world(*healthy, out, alarm("node-0")), policy, healthy[0], NOW)
    assert (about.decision, "1 of 4 nodes are out of use" in about.reason) == (NodeDecision.ALERT, True)
    planned = replace(out, maintenance="2027-01-15 10:00 UTC")
    about = about_node(world(*healthy, planned, alarm("node-0")), policy, healthy[0], NOW)
    assert about.decision is NodeDecision.TAINT, "maintenance does not use up the limit"


def test_same_alarm_on_many_nodes_stops_everything() -> None:
    one = rank(0, "node-0")
    nodes = [node(f"node-{n}", state=TAINTED if n == 0 else S.HEALTHY) for n in range(12)]
    alarms = [alarm(f"node-{n}", "link-flaps") for n in range(3)]
    there = world(*nodes, node("spare-1"), one, *alarms)
    assert "looks systematic" in systematic(there, acting(), NOW)
    assert decisions(there, acting())[one.uid][0] is RankDecision.ALERT
    assert about_node(there, acting(), nodes[1], NOW).decision is NodeDecision.ALERT
    assert systematic(world(*nodes, *alarms[:2]), acting(), NOW) == ""


def test_common_alarm_that_no_rule_acts_on_stops_nothing() -> None:
    one = rank(0, "node-0")
    nodes = [node(f"node-{n}", state=TAINTED if n == 0 else S.HEALTHY) for n in range(12)]
    clocks = [alarm(f"node-{n}", "webhook-ClockSkew", severity=Severity.WARNING) for n in range(1, 4)]
    there = world(*nodes, node("spare-1"), one, alarm("node-0"), *clocks)
    acts = {"name": "gpu", "checks": ["gpu-*"], "action": "move"}
    watches = {"name": "clock", "checks": ["webhook-*"], "severity": "notice", "action": "observe"}
    for rules in ([acts], [acts, watches]):
        assert decisions(there, acting(rules=rules))[one.uid][0] is RankDecision.MOVE
    for action in ("taint", "move", "drain"):
        by = acting(rules=[acts, {**watches, "action": action}])
        assert decisions(there, by)[one.uid][0] is RankDecision.ALERT


def test_alert_from_outside_makes_a_node_suspect_only_by_a_rule() -> None:
    there = world(node("spare-1"), alarm("spare-1", "webhook-DiskFills", severity=Severity.WARNING))
    watches = {"name": "disk", "checks": ["webhook-Disk*"], "severity": "warning", "action": "observe"}
    for rules, decision in (([], NodeDecision.KEEP), ([watches], NodeDecision.SUSPECT)):
        assert about_node(there, acting(rules=rules), there.nodes["spare-1"], NOW).decision is decision
    own = world(node("spare-1"), alarm("spare-1", "disk-full", severity=Severity.WARNING))
    assert about_node(own, acting(rules=[]), own.nodes["spare-1"], NOW).decision is NodeDecision.SUSPECT


def test_undone_moves_of_different_ranks_look_systematic() -> None:
    undone = [move(rank(n, "node-2", job=f"j{n}"), "spare-1", MoveState.UNDONE, 10) for n in range(3)]
    assert "3 moves were undone" in systematic(world(*undone), acting(), NOW)
    assert systematic(world(*undone[:2]), acting(), NOW) == ""


def test_order_overrules_breaker_and_window_but_not_the_opt_out_unless_it_is_an_evacuation() -> None:
    one = rank(0, "node-1")
    before = move(one, "node-1", MoveState.MOVED, 5)
    policy = acting(breaker={"moves": 0}, jobs=[{"job": "train", "move": False}])
    parts = (node("node-1", state=S.DRAINING), node("spare-1"), one, before)
    drain = Order(7, "drain", "node-1", since_unix_s=NOW)
    assert decisions(world(*parts, drain), policy)[one.uid][0] is RankDecision.ALERT
    evacuate = replace(drain, kind="evacuate")
    (about,) = about_ranks(world(*parts, evacuate), policy, NOW)
    assert (about.decision, about.why.cause, about.why.order) == (RankDecision.MOVE, "order 7", 7)


def test_named_targets_of_an_order_are_used() -> None:
    one = rank(0, "node-1")
    order = Order(1, "drain", "node-1", ("node-2",), since_unix_s=NOW)
    there = world(node("node-1", state=S.DRAINING), node("node-2"), node("spare-1"), one, order)
    assert decisions(there, acting()) == {one.uid: (RankDecision.MOVE, "node-2")}


# ---------------------------------------------------------------------- properties

_STATES = st.sampled_from(list(NodeState))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes: list[Node] = []
    for name in ("node-1", "node-2", "node-3", "spare-1", "spare-2"):
        free = draw(st.booleans())
        nodes.append(node(name, 2, state=draw(_STATES), reachable=free or draw(st.booleans())))
    ranks = [
        rank(n, draw(st.sampled_from(["node-1", "node-2", "node-3"])), job=draw(st.sampled_from("ab")), gpus=(n % 2,))
        for n in range(draw(st.integers(0, 5)))
    ]
    alarms = draw(
        st.lists(
            st.builds(
                alarm,
                st.sampled_from([one.name for one in nodes]),
                st.sampled_from(["gpu-ecc", "link-flaps"]),
                st.sampled_from(["host", "gpu:GPU-node-1-0", "rank:a-0-00000000"]),
                severity=st.sampled_from(Severity),
            ),
            max_size=5,
        )
    )
    past = [
        move(one, draw(st.sampled_from(["spare-1", "spare-2"])), draw(st.sampled_from(MoveState)), 60.0 * n)
        for n, one in enumerate(ranks)
        if draw(st.booleans())
    ]
    orders = [Order(1, "drain", "node-2", since_unix_s=NOW - 50)] if draw(st.booleans()) else []
    return world(*nodes, *ranks, *alarms, *past, *orders)


@settings(max_examples=80)
@given(worlds(), st.sampled_from(list(Action)))
def test_every_decision_keeps_the_safety_rules(there: World, action: Action) -> None:
    policy = acting(action)
    decided = about_ranks(there, policy, NOW)
    moves = [about for about in decided if about.decision is RankDecision.MOVE]
    for about in moves:
        target = there.nodes[about.target]
        assert target.state is NodeState.HEALTHY
        assert target.reachable
        assert about.target != about.rank.node
        assert about.reason
        assert about.why.cause
        assert not [past for past in there.running if past.rank_uid == about.rank.uid]
        recent = [past for past in there.moves if past.rank_uid == about.rank.uid and past.state is MoveState.MOVED]
        assert about.why.order or not recent
        failed = {(past.rank_uid, past.target) for past in there.moves if past.state in FAILED}
        assert (about.rank.uid, about.target) not in failed
    running = [past.job_key for past in there.running] + [about.rank.job_key for about in moves]
    for job in {about.rank.job_key for about in moves}:
        assert running.count(job) == 1
    by_rules = [about for about in moves if not about.why.order]
    assert len(by_rules) <= policy.breaker.moves
    if action in (Action.OBSERVE, Action.TAINT):
        assert all(about.why.order or there.nodes[about.rank.node].state is NodeState.DRAINING for about in moves)


@settings(max_examples=50)
@given(worlds())
def test_without_rules_and_orders_no_node_is_taken_out_of_use(there: World) -> None:
    calm = World(there.nodes, there.alarms, there.ranks, there.moves)
    for one in calm.nodes.values():
        decision = about_node(calm, Policy(), one, NOW).decision
        assert decision not in (NodeDecision.TAINT, NodeDecision.DRAIN)
