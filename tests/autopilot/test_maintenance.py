"""The maintenance calendar: windows in local time, drained in time, not used meanwhile, returned afterwards."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from migrator.autopilot import operate
from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import about_ranks
from migrator.autopilot.maintenance import (
    CALENDAR,
    MaintenanceDecision,
    MaintenanceFacts,
    about_maintenance,
    maintenance_next,
    next_window,
    window_at,
)
from migrator.autopilot.model import NodeState, Order
from migrator.autopilot.policy import Policy, from_values
from migrator.autopilot.store import Store
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import BadConfig
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import alerts, running, until
from tests.autopilot.worlds import NOW, node, rank, world
from tests.cli.conftest import Migrator, a_rank

TABLE = {"nodes": ["rack7-*"], "begin": "2026-12-01T22:00", "hours": 4, "reason": "new switch"}


def calendar(zone: str = "Europe/Berlin", **change: Any) -> Policy:
    return from_values({"timezone": zone, "maintenance": [TABLE | change]}, "the test")


def at(text: str, zone: str = "+01:00") -> float:
    return datetime.fromisoformat(text + zone).timestamp()


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        ("2026-12-01T20:59", False),  # an hour before
        ("2026-12-01T21:00", True),
        ("2026-12-02T01:59", True),
        ("2026-12-02T02:00", False),
        ("2026-12-08T23:00", False),
    ],
)
def test_window_lasts_from_its_lead_to_its_end(moment: str, found: bool) -> None:
    assert (window_at(calendar(), "rack7-3", at(moment)) is not None) is found
    assert window_at(calendar(), "rack8-3", at(moment)) is None


def test_weekly_window_keeps_its_time_of_the_clock_in_summer() -> None:
    weekly = calendar(repeat="weekly", hours=2)
    assert window_at(weekly, "rack7-1", at("2026-12-08T22:30")) is not None
    assert window_at(weekly, "rack7-1", at("2026-11-24T22:30")) is None, "before the first one"
    found = window_at(weekly, "rack7-1", at("2027-07-06T22:30", "+02:00"))
    assert found is not None
    assert (found.begin, found.end) == ("2027-07-06 22:00 CEST", "2027-07-07 00:00 CEST")
    following = next_window(weekly, "rack7-1", at("2027-07-07T00:00", "+02:00"))
    assert following is not None
    assert following.text == "maintenance from 2027-07-13 22:00 CEST to 2027-07-14 00:00 CEST: new switch"


def test_of_windows_that_overlap_the_longer_one_counts() -> None:
    both = from_values({"maintenance": [TABLE, TABLE | {"hours": 9, "nodes": ["*"]}]}, "the test")
    found = window_at(both, "rack7-1", at("2026-12-01T23:00", "+00:00"))
    assert found is not None
    assert found.end == "2026-12-02 07:00 UTC"


def test_wrong_tables_are_refused() -> None:
    changes: list[dict[str, Any]] = [
        {"begin": "tomorrow"},
        {"begin": "2026-02-30T10:00"},
        {"begin": "2026-12-01T22:00:00+01:00"},
        {"begin": "0001-01-01T00:00"},
        {"begin": "9999-12-31T23:00"},
        {"hours": 0},
        {"hours": 200},
        {"repeat": "daily"},
        {"nodes": []},
        {"lead": 1},
    ]
    for change in changes:
        with pytest.raises(BadConfig, match=rf"maintenance\[1\]\.{next(iter(change))}"):
            calendar(**change)


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (MaintenanceFacts(NodeState.HEALTHY), "keep"),
        (MaintenanceFacts(NodeState.HEALTHY, window="maintenance"), "drain"),
        (MaintenanceFacts(NodeState.TAINTED, window="maintenance"), "drain"),
        (MaintenanceFacts(NodeState.HEALTHY, window="maintenance", ordered=True), "keep"),
        (MaintenanceFacts(NodeState.HEALTHY, window="maintenance", handled=True), "keep"),
        (MaintenanceFacts(NodeState.DRAINED, window="maintenance", drained=True), "keep"),
        (MaintenanceFacts(NodeState.DRAINED, drained=True), "return"),
        (MaintenanceFacts(NodeState.DRAINED, drained=True, tainted=True), "alert"),
        (MaintenanceFacts(NodeState.REPAIRING, drained=True), "return"),
        (MaintenanceFacts(NodeState.REPAIRING, drained=True, answers=False), "alert"),
        (MaintenanceFacts(NodeState.REPAIRING, returned=True), "alert"),
        (MaintenanceFacts(NodeState.DRAINED), "keep"),
        (MaintenanceFacts(NodeState.HEALTHY, drained=True), "keep"),
    ],
)
def test_decision(facts: MaintenanceFacts, decision: str) -> None:
    assert maintenance_next(facts)[0] == decision


def test_what_an_operator_ordered_is_not_returned_by_the_calendar() -> None:
    there, by = world(node("rack7-1", state=NodeState.DRAINED)), calendar()
    over = at("2026-12-02T03:00")
    mine = Order(1, "drain", "rack7-1", by=CALENDAR, since_unix_s=at("2026-12-01T21:00"))
    assert about_maintenance(there, by, "rack7-1", mine, over)[0] is MaintenanceDecision.RETURN
    theirs = Order(2, "drain", "rack7-1", by="alice", since_unix_s=at("2026-12-01T21:30"))
    assert about_maintenance(there, by, "rack7-1", theirs, over)[0] is MaintenanceDecision.KEEP
    assert about_maintenance(there, by, "rack7-1", None, over)[0] is MaintenanceDecision.KEEP


def test_no_rank_is_placed_on_a_node_with_maintenance() -> None:
    order = Order(3, "drain", "node-1", by="alice", since_unix_s=NOW)
    one = rank(0, "node-1")
    soon = node("spare-1", maintenance="2027-01-15 10:00 UTC")
    (about,) = about_ranks(world(node("node-1"), soon, one, order), Policy(), NOW)
    assert (about.decision, "spare-1: has maintenance until 2027-01-15 10:00 UTC" in about.reason) == (
        RankDecision.ALERT,
        True,
    )
    (about,) = about_ranks(world(node("node-1"), soon, node("spare-2"), one, order), Policy(), NOW)
    assert about.target == "spare-2"


# ---------------------------------------------------------------------- with fake daemons


def window_now(nodes: list[str], begins_in_s: float, lead_s: float = 3600) -> Policy:
    """A window of two hours."""
    begin = (datetime.now(UTC) + timedelta(seconds=begins_in_s)).strftime("%Y-%m-%dT%H:%M")
    return from_values({"maintenance": [{"nodes": nodes, "begin": begin, "hours": 2, "lead_s": lead_s}]}, "the test")


async def state_of(store: Store, name: str) -> str:
    known = (await store.load()).nodes.get(name)
    return known.state.value if known is not None else "healthy"


async def in_state(store: Store, name: str, state: str) -> bool:
    return await state_of(store, name) == state


async def test_node_is_drained_before_its_window_and_returned_after_it(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    async with running(pilots, window_now(["node-1", "spare-1"], 1800)) as store:

        async def drained() -> bool:
            return [await state_of(store, name) for name in ("node-1", "spare-1")] == ["drained"] * 2

        await until("both nodes to be drained", drained)
        assert pilots.places() == {"train-0-00000001": "spare-2"}, "the other one has the same window"
    async with running(pilots, window_now(["node-1", "spare-1"], -3 * 3600)) as store:  # it is over

        async def home() -> bool:
            return pilots.places() == {"train-0-00000001": "node-1"}

        await until("the rank to be home", home)

        async def ended() -> bool:
            return not (await store.load()).orders

        await until("the orders to end", ended)
        assert [await state_of(store, name) for name in ("node-1", "spare-1")] == ["returned"] * 2
        orders = [record.text for record in await store.events() if record.kind == "order"]
    assert len(orders) == 4, "each was given once"
    assert orders[0].startswith(f"{CALENDAR} ordered to drain node-1: maintenance from ")
    assert orders[-1] == f"{CALENDAR} ordered to return spare-1: its maintenance is over"


async def test_node_that_was_tainted_before_its_window_is_not_used_after_it(pilots: PilotCluster) -> None:
    async with Store.open(pilots.path.parent / "state") as store:
        await operate.taint(store, "node-1", "a strange noise", "alice")
    async with running(pilots, window_now(["node-1"], 1800)) as store:
        await until("the node to be drained", lambda: in_state(store, "node-1", "drained"))
    async with running(pilots, window_now(["node-1"], -3 * 3600)) as store:
        await alerts(store, "it was tainted before")
        assert await state_of(store, "node-1") == "drained"


async def test_what_a_rule_drained_after_an_undrain_is_not_returned_by_the_calendar(pilots: PilotCluster) -> None:
    over, by = at("2026-12-02T03:00"), calendar()
    async with Store.open(pilots.path.parent / "state") as store:
        order = await store.give_order(Order(0, "drain", "rack7-1", by=CALENDAR), NodeState.DRAINED)
        await store.end_order(order.id, "0 ranks moved")

        async def decision() -> MaintenanceDecision:
            last = (await store.last_orders()).get("rack7-1")
            return about_maintenance(world(node("rack7-1", state=NodeState.DRAINED)), by, "rack7-1", last, over)[0]

        assert await decision() is MaintenanceDecision.RETURN
        await operate.use_again(store, "rack7-1", "alice")
        await store.set_node("rack7-1", NodeState.DRAINED, "rule gpu: gpu-ecc")
        assert await decision() is MaintenanceDecision.KEEP
        again = await store.give_order(Order(0, "drain", "rack7-1", by=CALENDAR), NodeState.DRAINED)
        await store.end_order(again.id, "0 ranks moved")
        assert await decision() is MaintenanceDecision.RETURN, "the next window is another one"


async def test_failed_validation_after_a_window_alerts(pilots: PilotCluster) -> None:
    wrong = pb.Diagnosis(check="criu", state="failed", text="it is gone")
    pilots["node-2"].diagnosis = pb.DiagnoseReply(findings=[wrong])
    async with Store.open(pilots.path.parent / "state") as store:
        order = await store.give_order(Order(0, "drain", "node-2", by=CALENDAR), NodeState.DRAINED)
        await store.end_order(order.id, "0 ranks moved")
    async with running(pilots, Policy()) as store:
        await alerts(store, "its validation failed")
        assert await state_of(store, "node-2") == "repairing"


def test_policy_check_and_explain_show_the_calendar(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    begin = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(time.time() + 1800))
    file.write_text(f'[[maintenance]]\nnodes = ["node-1"]\nbegin = "{begin}"\nhours = 1\nreason = "new switch"\n')
    assert "node-1: maintenance from " in migrator("policy", "check", str(file)).out
    assert migrator("policy", "check", str(file), "--json").json["maintenance"][0]["nodes"] == ["node-1"]
    pilots["node-1"].ranks.append(a_rank("node-1"))
    argv = ("policy", "explain", "node-1", "--policy", str(file))
    text = migrator(*argv).out
    assert "decision: drain: maintenance from " in text
    assert "rank 0 of train: move to spare-1" in text
    found = migrator(*argv, "--json").json
    assert (found["decision"], found["maintenance"].endswith("new switch")) == ("drain", True)
    file.write_text('[[maintenance]]\nnodes = ["spare-1"]\nbegin = "2020-01-01T00:00"\nhours = 1\n')
    assert "spare-1: its maintenance is over" in migrator("policy", "check", str(file)).out
    assert "calendar" not in migrator(*argv).out
