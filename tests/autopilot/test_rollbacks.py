"""Rollbacks in the autopilot's event log and report: each is recorded once, as work that was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from migrator.autopilot import report, watcher
from migrator.autopilot.chain import Record
from migrator.autopilot.store import Store
from migrator.rollbacks import ended
from snapshotd.api import snapshotd_pb2 as pb
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import running, until
from tests.cli.conftest import Migrator
from tests.cli.fake_jobs import a_rollback


async def rollbacks(store: Store) -> list[Record]:
    return [record for record in await store.events() if record.kind == "rollback"]


async def test_rollback_is_recorded_once(pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "POLL_S", 0.1)
    pilots["node-1"].jobs = [a_rollback()]

    async def recorded(store: Store, count: int) -> None:
        async def there() -> bool:
            return len(await rollbacks(store)) >= count

        await until("the record", there)

    async with running(pilots) as store:
        await recorded(store, 1)
    async with running(pilots) as store:  # after a restart too
        pilots["node-1"].jobs.append(a_rollback("m-0000000000c9"))
        await recorded(store, 2)
        first, second = await rollbacks(store)
    assert first.text == "train: rolled back 143 s, down 11.8 s, node-7 lost (does not answer)"
    assert (first.node, first.data["job_key"], second.data["record"]) == ("node-1", "7/train", "m-0000000000c9")


async def test_node_that_reports_no_numbers_is_not_believed(pilots: PilotCluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(watcher, "POLL_S", 0.1)
    pilots["node-1"].jobs = [a_rollback(lost_s=float("nan"))]
    pilots["node-2"].jobs = [a_rollback()]
    async with running(pilots) as store:

        async def there() -> list[Record]:
            return await rollbacks(store)

        await until("the record", there)
        assert {record.node for record in await rollbacks(store)} == {"node-2"}


def test_report_counts_a_rollback_as_lost_progress(tmp_path: Path, migrator: Migrator) -> None:
    state = tmp_path / "state"
    made = asyncio.run(_recorded_twice(state))
    (one,) = made.interruptions
    assert (one.outcome, one.lost_s, one.pause_s, one.rank) == ("rolled back", 143.2, 11.8, report.ALL_RANKS)
    assert (made.total.all, made.total.resolved, made.saved_gpu_hours) == (1, 0, 0)
    values = made.to_json()
    assert (values["rollbacks"], values["lost_s"]) == (1, 143.2)
    shown = migrator("report", "--state", str(state), "--since", "999999d").out
    assert "work lost in rollbacks" in shown
    assert "143 s (1 rollback)" in shown
    assert "node-7 lost (does not answer)" in shown


async def _recorded_twice(state: Path) -> report.Report:
    reply = pb.ListJobsReply(jobs=[a_rollback()])
    async with Store.open(state) as store:
        found = await store.new_rollbacks("node-1", ended("node-1", reply))
        await store.record_rollbacks("node-1", [*found, *found])
        assert await store.new_rollbacks("node-1", ended("node-1", reply)) == []
        return report.build(await store.events(), since_unix_s=0.0, until_unix_s=9000.0)
