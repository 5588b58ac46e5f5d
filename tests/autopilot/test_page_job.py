"""What the page shows of one job, and of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from migrator.autopilot.model import Loss, MoveState, NodeState, Order, Proposal
from migrator.autopilot.pace import Pace, Period
from migrator.autopilot.page import job_records
from migrator.autopilot.page.jobs import RANKS
from migrator.autopilot.suspension import SuspendedRank, Suspension, SuspensionState
from migrator.autopilot.world import World
from tests.autopilot import worlds
from tests.autopilot.pages import Page, served
from tests.autopilot.test_engine import until

KEY = "1000/train"


def a_job() -> World:
    """Two ranks, of which one is slow and away from home, and one of another job."""
    slow = worlds.rank(1, "spare-1", home="node-2")
    loss = Loss(KEY, 0.25, 12.4, 8.0, 6.0, 1, confirmed=True)
    alarms = [
        worlds.alarm("spare-1", "job-straggler", f"rank:{slow.uid}", loss=loss),
        worlds.alarm("spare-1", "job-stall", f"rank:{slow.uid}"),
    ]
    ranks = [worlds.rank(0, "node-1", gpus=(1,), home="node-1"), slow, worlds.rank(0, "node-1", "bench")]
    return worlds.world(worlds.node("node-1", 2), worlds.node("node-2"), worlds.node("spare-1"), *ranks, *alarms)


async def job(page: Page, key: str = KEY, find: str = "") -> Any:
    return (await page.get(f"/api/job?job={quote(key, safe='')}&find={quote(find)}")).json


async def test_job_is_shown_with_ranks_pace_and_stragglers(tmp_path: Path) -> None:
    async with served(tmp_path, a_job()) as page:
        page.paces[KEY] = Pace(((100.0, 6.0), (105.0, 6.5)), Period(2.51, 15))
        shown = await job(page)
        facts = [(one["rank"], one["node"], one["home"], one["gpus"]) for one in shown["ranks"]]
        assert facts == [(1, "spare-1", "node-2", []), (0, "node-1", "node-1", [1])]  # the one in trouble first
        assert (shown["all_ranks"], shown["nodes"], shown["away"]) == (2, 2, 1)
        assert shown["pace"]["points"] == [[100, 6.0], [105, 6.5]]
        assert (shown["pace"]["period_s"], shown["pace"]["period_collectives"]) == (2.51, 15)
        (slow,) = shown["stragglers"]
        assert (slow["rank"], slow["share"], slow["lost_s"], slow["usual_per_s"]) == (1, 0.25, 12, 8.0)
        assert [one["check"] for one in shown["alarms"]] == ["job-stall"]
        assert (await job(page, "1000/bench"))["pace"] is None
        assert (await job(page, "1000/<img>"))["ranks"] == []
        for wrong in ("train", "1000/" + "x" * 2000):
            assert (await page.get(f"/api/job?job={wrong}")).status == 400


async def test_suspended_job_is_shown_until_it_is_resumed(tmp_path: Path) -> None:
    """It has no rank on any node."""
    rank = SuspendedRank("low-0", 0, "node-2", "node-2", (), 1)
    one = Suspension("m-1", "low", 1000, (rank,), "node-2", "train-0", "to make room", 1.0, SuspensionState.SUSPENDED)
    over = replace(one, id="m-2", job="other", state=SuspensionState.RESUMED)
    async with served(tmp_path, replace(a_job(), suspensions=(one, over))) as page:
        listed = (await page.get("/api/state")).json["suspended"]
        assert [(one["job"], one["state"], one["ranks"], one["reason"]) for one in listed] == [
            ("low", "suspended", 1, "to make room")
        ]
        assert (await job(page, "1000/low"))["suspended"] == listed[0]
        assert (await job(page, "1000/other"))["suspended"] is None


async def test_job_has_its_own_moves_and_records(tmp_path: Path) -> None:
    world = a_job()
    first, slow, other = world.ranks
    async with served(tmp_path, world) as page:
        store = page.store
        for rank, number in ((slow, 1), (other, 2)):
            move = worlds.move(rank, "node-2", MoveState.INTENDED, id=f"m-{number}", cause_class="hardware")
            await store.intend(move)
            await store.finish(move.id, MoveState.MOVED, "", pause_s=2.5)
        await store.set_job_alarms([alarm for alarm in world.alarms if alarm.check == "job-stall"])
        order = Order(0, "move", "node-1", by="alice", rank_uid=first.uid, rank_name="rank 0 of train")
        given = await store.give_order(order, None)
        await store.end_order(given.id, "0 ranks moved")
        await store.set_node("node-1", NodeState.TAINTED, "a fan")

        async def complete() -> Any:
            shown = await job(page)
            return shown if len(shown["records"]) == 5 else None

        shown = await until("the records", complete)
        kinds = [one["kind"] for one in shown["records"]]
        assert kinds == ["order-ended", "order", "signal", "result", "intent"]
        facts = [(one["rank"], one["source"], one["target"], one["outcome"], one["pause_s"]) for one in shown["moves"]]
        assert facts == [(1, "spare-1", "node-2", "moved", 2.5)]


async def test_records_of_jobs_are_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(job_records, "SUBJECTS", 3)
    async with served(tmp_path, a_job()) as page:
        kept = job_records.JobRecords()
        for number in range(100):
            await page.store.note("signal", "x", job_key=f"1000/job-{number // 20}")
        for record in await page.store.events():
            kept.take(record)
        assert [len(kept.of(f"1000/job-{number}", ())) for number in range(5)] == [0, 0, 20, 20, 20]


async def test_ranks_of_a_large_job_can_be_found(tmp_path: Path) -> None:
    nodes = [worlds.node(f"node-{number:03}") for number in range(RANKS)]
    ranks = [worlds.rank(number, f"node-{number // 2:03}") for number in range(2 * RANKS)]
    async with served(tmp_path, worlds.world(*nodes, *ranks)) as page:
        shown = await job(page)
        assert (len(shown["ranks"]), shown["found_ranks"], shown["all_ranks"]) == (RANKS, 2 * RANKS, 2 * RANKS)
        assert [one["rank"] for one in (await job(page, find="500"))["ranks"]] == [500]
        assert [one["rank"] for one in (await job(page, find="node-200"))["ranks"]] == [400, 401]


async def test_report_has_both_shares_days_and_nodes_that_fail(tmp_path: Path) -> None:
    world = a_job()
    async with served(tmp_path, world) as page:
        now = page.store.now()
        for number, (state, cause, ago_d) in enumerate(
            [(MoveState.MOVED, "hardware", 0), (MoveState.MOVED, "network", 2), (MoveState.LOST, "software", 2)]
        ):
            page.store.now = lambda ago_d=ago_d: now - 86400 * ago_d  # type: ignore[misc]
            rank = replace(world.ranks[0], uid=f"rank-{number}")
            move = worlds.move(rank, "spare-1", MoveState.INTENDED, id=f"m-{number}", cause_class=cause)
            await page.store.intend(replace(move, detected_unix_s=now - 86400 * ago_d))
            await page.store.finish(move.id, state, "", pause_s=2.0)
        await page.store.set_node("node-2", NodeState.TAINTED, "a rule")
        await page.store.set_node("node-2", NodeState.HEALTHY, "repaired", "alice")
        page.store.now = lambda: now

        async def complete() -> Any:
            shown = (await page.get("/api/state")).json["report"]
            return shown if shown["all"] == 3 and shown["lemons"] else None

        shown = await until("the report", complete)
        assert (shown["resolved"], shown["all"], shown["percent"]) == (2, 3, 66.7)
        assert shown["without_software"] == {"resolved": 2, "all": 2, "percent": 100.0}
        assert (len(shown["by_day"]), shown["by_day"][-1], shown["by_day"][-3]) == (30, [1, 0], [1, 1])
        assert (shown["lemons"][0]["node"], shown["lemons"][0]["failures"]) == ("node-2", 1)


async def test_proposal_is_shown_and_answered(tmp_path: Path) -> None:
    async with served(tmp_path, a_job()) as page:
        await page.store.set_proposals({"k": Proposal(0, "k", "drain node-1", "it fails", "node-1")})

        async def proposal() -> Any:
            found = (await page.get("/api/state")).json["proposals"]
            return found[0] if found else None

        shown = await until("the proposal", proposal)
        assert (shown["what"], shown["why"], shown["state"]) == ("drain node-1", "it fails", "open")
        for action, status in (("approve", 200), ("approve", 409), ("reject", 200)):
            answer = await page.act(action, "", more={"proposal": shown["id"]})
            assert answer.status == status, answer.body
        assert (await page.act("approve", "", more={"proposal": 99})).status == 404
        assert (await page.act("approve", "", token="x" * 40, more={"proposal": 1})).status == 401
        (known,) = await page.store.proposals()
        assert (known.state, known.by, known.reason) == ("rejected", "alice (page)", "a test")
