"""What a rollback has cost: the coordinator's journal says how much work was lost and how long the job did not run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.jobs import lost_time
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from tests.moves.test_coordinator import FIRST, RECORD, part
from tests.moves.test_rollback_records import THIRD, Protected


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Protected]:
    made = Protected(tmp_path, monkeypatch)
    yield made
    await made.stop()


async def resume(daemon: Protected) -> None:
    await daemon.settle(THIRD)
    parts = [part(0, 80, 16), part(1, 81, 17)]
    begin = pb.BeginJobRequest(record=RECORD, job="t", user_id=7, suspension=THIRD, participants=parts, lease_s=30)
    await daemon.steps.begin(begin)
    daemon.copies |= {f"m-{80 + rank:012x}": pb.Copy(state=pb.Copy.HELD) for rank in (0, 1)}
    await daemon.steps.commit(RECORD)


def near(lost_s: float, down_for_s: float) -> Any:
    """Differences of times have an error of some hundred nanoseconds."""
    return pytest.approx({"lost_s": lost_s, "down_for_s": down_for_s}, abs=1e-3)


async def test_work_since_the_snapshot_is_lost_without_the_time_for_which_the_job_was_down(daemon: Protected) -> None:
    await daemon.take(FIRST)
    snapshot = daemon.journal.get(FIRST)
    taken = snapshot.begin.begun_unix_s
    assert lost_time.at_rollback(daemon.journal, snapshot, 10.0, taken + 100) == near(90.0, 10.0)
    assert lost_time.at_rollback(daemon.journal, snapshot, 500.0, taken + 100) == near(0.0, 100.0)
    assert lost_time.at_rollback(daemon.journal, snapshot, float("nan"), taken + 1)["down_for_s"] == 0.0


async def test_record_of_a_rollback_says_what_it_has_cost_and_why(daemon: Protected) -> None:
    await daemon.take(FIRST)
    nodes = [pb.NodeAddresses(name=name, endpoint="e") for name in ("node-1", "node-2")]
    request = pb.RollbackRequest(record=THIRD, snapshot=FIRST, nodes=nodes, reason="node-7 lost", down_for_s=0.001)
    await daemon.steps.rollback(request, "operator")
    (before,) = (await daemon.steps.listed(rollbacks_only=True)).jobs
    assert (before.resumed_unix_s, before.down_s) == (0.0, 0.0)
    await resume(daemon)
    (one,) = (await daemon.steps.listed(rollbacks_only=True)).jobs
    assert (one.record, one.reason, one.ranks) == (THIRD, "node-7 lost", 2)
    assert one.HasField("lost_s")
    assert one.lost_s > 0
    assert one.resumed_unix_s > one.begun_unix_s
    assert one.down_s == pytest.approx(one.resumed_unix_s - one.begun_unix_s + 0.001, abs=1e-3)


async def test_second_rollback_to_a_snapshot_loses_what_was_done_since_the_first(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.roll_back(FIRST)
    await resume(daemon)
    resumed = daemon.journal.get(RECORD).outcome
    assert resumed is not None
    cost = lost_time.at_rollback(daemon.journal, daemon.journal.get(FIRST), 0.0, resumed.unix_s + 7)
    assert cost["lost_s"] == pytest.approx(7.0, abs=1e-3)


async def test_snapshot_that_was_taken_over_is_as_old_as_its_images(daemon: Protected) -> None:
    """The record of the node that took it over is younger than the snapshot."""
    await daemon.take(FIRST)
    snapshot = daemon.journal.get(FIRST)
    snapshot.mark(Mark.SETTLED, adopted_from="node-9")
    taken = snapshot.begin.begun_unix_s
    assert lost_time.at_rollback(daemon.journal, snapshot, 0.0, taken + 100)["lost_s"] is None
    image = Begin(
        *("m-0000000000f0", "source", "train-0", "train", 0, "node-1", "e", "", "", "00" * 32, "boot", taken - 50),
        coordinator=FIRST,
        kind="snapshot",
    )
    daemon.journal.begin(image)
    assert lost_time.at_rollback(daemon.journal, snapshot, 0.0, taken + 100)["lost_s"] == pytest.approx(150.0, abs=1e-3)
