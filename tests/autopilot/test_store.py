"""What survives: each event once, each intent before its result, and a log in which every change is noticed."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.autopilot import actor, chain
from migrator.autopilot.database import FILE
from migrator.autopilot.model import HealthEvent, HealthReport, MoveState, NodeState, Order, Severity
from migrator.autopilot.store import Store
from snapshotd.api.errors import BadConfig, Busy, WrongState
from tests.autopilot.worlds import alarm, move, rank

INTENT = move(rank(0, "node-1"), "spare-1", MoveState.INTENDED, id="m-000000000001")


def event(sequence: int, kind: str = "raised") -> HealthEvent:
    return HealthEvent(sequence, 1000.0 + sequence, kind, "gpu-ecc", "host", Severity.CRITICAL, "it fails")


def report(*sequences: int, epoch: str = "e1", **fields: object) -> HealthReport:
    made = HealthReport("node-1", epoch, max(sequences, default=0), (), tuple(map(event, sequences)))
    return replace(made, **fields)  # type: ignore[arg-type]


async def signals(store: Store) -> list[tuple[str, int]]:
    return [(one.data["epoch"], one.data["sequence"]) for one in await store.events() if one.kind == "signal"]


async def test_events_of_a_node_are_recorded_once_and_in_order(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        assert await store.take_in(report(1, 2))
        assert not await store.take_in(report(1, 2))  # the answer was lost and asked for again
        await store.take_in(report(2, 3))
        await store.take_in(report(1, epoch="e2"))
    async with Store.open(tmp_path) as store:  # restarted
        await store.take_in(report(1, epoch="e2"))
        assert await signals(store) == [("e1", 1), ("e1", 2), ("e1", 3), ("e2", 1)]
        assert await store.cursor("node-1") == ("e2", 1)
        assert [one.kind for one in await store.events()].count("epoch") == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_any_overlapping_answers_record_every_event_once(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]]
) -> None:
    async def scenario() -> None:
        async with Store.open(tmp_path_factory.mktemp("state")) as store:
            reached = 0
            for back, ahead in ranges:  # a daemon answers from any point that was reached, without gaps
                first = max(1, reached + 1 - back)
                last = reached + ahead
                await store.take_in(report(*range(first, last + 1)))
                reached = max(reached, last)
            assert await signals(store) == [("e1", number) for number in range(1, reached + 1)]
            assert chain.problems(await store.events()) == []

    asyncio.run(scenario())


async def test_gap_in_a_nodes_events_is_recorded(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await store.take_in(report(7, pruned=True))
        assert [one.kind for one in await store.events()] == ["gap", "signal"]


async def test_alarms_are_those_of_the_last_answer(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await store.take_in(report(1, alarms=(alarm("node-1"), alarm("node-1", "mce"))))
        await store.set_own_alarm("node-1", alarm("node-1", "daemon-unreachable"))
        await store.take_in(report(2, alarms=(alarm("node-1", "mce"),)))
        assert sorted(one.check for one in (await store.load()).alarms) == ["daemon-unreachable", "mce"]
        assert await store.set_own_alarm("node-1", None)
        assert not await store.set_own_alarm("node-1", None)


async def test_intent_is_there_after_a_restart_and_the_result_is_recorded_once(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await store.intend(INTENT)
    async with Store.open(tmp_path) as store:
        assert [one.id for one in (await store.load()).moves] == [INTENT.id]
        assert await store.finish(INTENT.id, MoveState.MOVED, "", 1.5)
        assert not await store.finish(INTENT.id, MoveState.UNDONE, "again")
        (ended,) = (await store.load()).moves
        assert (ended.state, ended.pause_s) == (MoveState.MOVED, 1.5)
        assert [one.kind for one in await store.events()] == ["intent", "result"]


async def test_rank_is_not_intended_to_move_twice(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        await store.intend(INTENT)
        with pytest.raises(WrongState, match="being moved already"):
            await other.intend(replace(INTENT, id="m-000000000002"))
        assert len(await store.events()) == 1


async def test_old_moves_are_not_loaded(tmp_path: Path) -> None:
    moment = 1000.0
    async with Store.open(tmp_path, clock=lambda: moment) as store:
        await store.intend(INTENT)
        await store.finish(INTENT.id, MoveState.MOVED, "")
        assert len((await store.load(999.0)).moves) == 1
        assert (await store.load(1001.0)).moves == ()


async def test_order_changes_the_node_and_excludes_another(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        order = await store.give_order(Order(0, "drain", "node-1", by="alice"), NodeState.DRAINING)
        stored = await store.load()
        assert (stored.orders, stored.nodes["node-1"].state) == ((order,), NodeState.DRAINING)
        with pytest.raises(WrongState, match="drain of node-1 is in progress"):
            await store.give_order(Order(0, "evacuate", "node-1"), NodeState.DRAINING)
        assert await store.end_order(order.id, "2 ranks moved")
        assert not await store.end_order(order.id, "again")
        assert (await store.order(order.id)).summary == "2 ranks moved"
        assert (await store.load()).orders == ()


async def test_alert_is_recorded_when_it_begins_changes_and_ends(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for text in ("moved 8 s ago", "moved 9 s ago", "no spare"):
            await store.set_alerts({"rank 0": text})
        await store.set_alerts({})
        kinds = [(one.kind, one.text) for one in await store.events()]
        assert kinds == [
            ("alert", "rank 0: moved 8 s ago"),
            ("alert", "rank 0: no spare"),
            ("alert-over", "rank 0: no spare"),
        ]


async def test_two_processes_append_to_one_chain(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        await asyncio.gather(*(one.note("test", "x") for _ in range(20) for one in (store, other)))
        records = await store.events()
        assert (len(records), chain.problems(records)) == (40, [])


async def test_cancelled_write_leaves_the_store_usable(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for turns in range(12):
            task = asyncio.create_task(store.note("test", "x"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await store.note("test", "y")
        assert chain.problems(await store.events()) == []


# ---------------------------------------------------------------------- the chain


async def filled(folder: Path) -> list[chain.Record]:
    async with Store.open(folder) as store:
        await store.note("start", "begun")
        await store.intend(INTENT)
        await store.finish(INTENT.id, MoveState.MOVED, "")
        await store.note("stop", "ended")
        return await store.events()


def tampered(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / FILE) as raw:
        raw.execute("DROP TRIGGER events_are_not_changed")
        raw.execute("DROP TRIGGER events_are_not_removed")
        raw.execute(statement)
    raw.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE events SET text = 'other' WHERE id = 2", "record 2 was changed"),
        ("UPDATE events SET unix_s = unix_s + 1 WHERE id = 1", "record 1 was changed"),
        ("DELETE FROM events WHERE id = 2", "record 2 is missing"),
        ("DELETE FROM events WHERE id = 4", "no record has the digest"),
    ],
)
async def test_tampering_is_noticed(tmp_path: Path, statement: str, problem: str) -> None:
    records = await filled(tmp_path)
    assert chain.problems(records, known=records[-1].digest) == []
    tampered(tmp_path, statement)
    async with Store.open(tmp_path) as store:
        assert problem in "\n".join(chain.problems(await store.events(), known=records[-1].digest))


async def test_events_cannot_be_changed_by_accident(tmp_path: Path) -> None:
    await filled(tmp_path)
    raw = sqlite3.connect(tmp_path / FILE)
    with pytest.raises(sqlite3.IntegrityError, match="never changed"):
        raw.execute("UPDATE events SET text = ''")
    with pytest.raises(sqlite3.IntegrityError, match="never removed"):
        raw.execute("DELETE FROM events")
    raw.close()


def test_result_without_intent_and_intent_without_reason_are_noticed() -> None:
    first = chain.record(1, 1.0, "result", "n", "", {"id": "m-1"}, chain.START)
    second = chain.record(2, 1.0, "intent", "n", "", {"id": "m-2", "reason": ""}, first.digest)
    third = chain.record(3, 1.0, "intent", "n", "", {"id": "m-2", "reason": "r"}, second.digest)
    found = "\n".join(chain.problems([first, second, third]))
    assert "without having been intended" in found
    assert "has no reason" in found
    assert "intended twice" in found


# ---------------------------------------------------------------------- files and the lock


async def test_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match="cannot be used"):
        async with Store.open(tmp_path / "file" / "state"):
            pass
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(BadConfig, match="cannot be used"):
        async with Store.open(tmp_path):
            pass


async def test_database_of_another_version_is_refused(tmp_path: Path) -> None:
    await filled(tmp_path)
    raw = sqlite3.connect(tmp_path / FILE)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(BadConfig, match="another version"):
        async with Store.open(tmp_path):
            pass


def test_only_one_process_acts(tmp_path: Path) -> None:
    with actor.acting(tmp_path) as first:
        assert first
        with actor.acting(tmp_path) as second:
            assert not second
        with pytest.raises(Busy, match="another autopilot"), actor.only_one(tmp_path):
            pass
    with actor.only_one(tmp_path):
        pass


async def test_changes_at_the_same_time_are_all_recorded_and_one_that_fails_is_taken_back_alone(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        told: list[int] = []
        store.on_record = lambda record: told.append(record.id)
        await store.intend(INTENT)
        changes = [store.note("page", f"note {number}") for number in range(20)]
        changes.insert(10, store.intend(replace(INTENT, id="m-000000000002")))  # the rank is being moved already
        results = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(one) for one in results if one is not None] == [WrongState]
        assert told == list(range(1, 22))
    async with Store.open(tmp_path) as store:
        records = await store.events()
        assert [record.text for record in records[1:]] == [f"note {number}" for number in range(20)]
        assert chain.problems(records) == []
        assert [move.id for move in await store.intended()] == [INTENT.id]


async def test_a_change_whose_task_is_cancelled_keeps_no_other_from_being_recorded(tmp_path: Path) -> None:
    """Whenever it is cancelled: what it changed is recorded as a whole, or not at all."""
    async with Store.open(tmp_path) as store:
        for steps in range(40):
            first = asyncio.create_task(store.set_node("node-1", NodeState.TAINTED, f"reason {steps}"))
            second = asyncio.create_task(store.note("page", f"note {steps}"))
            for _ in range(steps):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await second
        records = await store.events()
        assert chain.problems(records) == []
        assert [record.text for record in records if record.kind == "page"] == [f"note {steps}" for steps in range(40)]
        states = [record for record in records if record.kind == "state"]
        if states:
            assert (await store.load()).nodes["node-1"].reason == states[-1].data["reason"]


async def test_state_that_an_operator_has_changed_meanwhile_stays(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await store.set_node("node-1", NodeState.TAINTED, "a cable", "alice")
        suspect = (NodeState.HEALTHY, NodeState.SUSPECT, "it is late")
        await store.set_nodes({"node-1": suspect, "node-2": suspect})
        nodes = (await store.load()).nodes
    assert (nodes["node-1"].state, nodes["node-2"].state) == (NodeState.TAINTED, NodeState.SUSPECT)
