"""Tests the search for the cut with a job that is larger than a lab's: a real driver, simulated daemons (scale_job.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from integration import scale_job
from integration.scale_job import JOB, RANKS_PER_NODE, USER_ID, Layout, Rank, Weather, uid
from migrator.cluster import Cluster
from migrator.quiesce.gates import Gates
from migrator.quiesce.process_reports import (
    Membership,
    Numbers,
    ProcessReport,
    only_counts,
    report_for_cut,
    updated,
)
from snapshotd.api import snapshotd_pb2 as pb

CALM = Weather()


async def to_the_cut(folder: Path, layout: Layout, ranks: list[Rank], weather: Weather = CALM) -> Gates:
    ready = asyncio.Event()
    serving = asyncio.create_task(scale_job.serve(folder, ranks, weather, 1, ready.set))
    try:
        await ready.wait()
        nodes = {f"node-{number}": f"unix:{folder}/node-{number}" for number in range(layout.ranks // RANKS_PER_NODE)}
        gates = Gates(Cluster(origin="test", nodes=nodes))
        await gates.quiesce(
            pb.MoveDescription(move="m-1", rank_uid=uid(0), job=JOB, source_node="node-0", user_id=USER_ID), 120.0
        )
        return gates
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def uneven(ranks: list[Rank]) -> list[str]:
    """Operations that one member has launched and another has not."""
    numbers = {(comm, known[1]): one for one in ranks for comm, known in one.place.memberships.items()}
    found = []
    for one in ranks:
        for (comm, kind, peer), count in one.launched.items():
            size, me = one.place.memberships[comm]
            if kind == scale_job.COLLECTIVE:
                others = [numbers[comm, other].launched[comm, kind, -1] for other in range(size)]
            else:
                back = scale_job.RECEIVE if kind == scale_job.SEND else scale_job.SEND
                others = [numbers[comm, peer].launched[comm, back, me]]
            found += [
                f"rank {one.place.rank}: {comm} {kind} {peer}: {count}, not {other}"
                for other in others
                if other != count
            ]
    return found


@pytest.mark.parametrize("turns", [False, True], ids=["one thread", "two threads take turns"])
def test_ranks_far_apart_need_few_rounds(tmp_path: Path, turns: bool) -> None:
    """The slowest rank is some hundred operations behind the first. Each of them took a round once."""
    layout = Layout(tensor=2, data=2, stages=4, turns=turns)
    ranks = scale_job.starts(layout, skew=30, seed=7)
    assert len(uneven(ranks)) > 50
    begun = [one.at for one in ranks]
    gates = asyncio.run(to_the_cut(tmp_path, layout, ranks))
    assert not uneven(ranks)
    assert max(one.at - before for one, before in zip(ranks, begun, strict=True)) > 100
    if not turns:  # waiting for idle threads takes rounds
        assert gates.rounds <= 15


def test_slow_nodes_and_lost_answers_delay_the_cut_and_do_not_prevent_it(tmp_path: Path) -> None:
    """A call whose answer is lost was carried out, and is made again."""
    layout = Layout(tensor=2, data=2, stages=4)
    ranks = scale_job.starts(layout, skew=10, seed=7)
    gates = asyncio.run(to_the_cut(tmp_path, layout, ranks, Weather(slow=0.5, lost=0.2)))
    assert not uneven(ranks)
    assert all(one.closed for one in ranks)
    assert gates.rounds > 1


def copied(gate: pb.ProcessGate) -> pb.ProcessGate:
    made = pb.ProcessGate()
    made.CopyFrom(gate)
    return made


def test_report_made_from_the_last_one_equals_one_made_anew() -> None:
    layout, random = Layout(tensor=2, data=2, stages=4, turns=True), Random(3)
    ranks = scale_job.starts(layout, skew=5, seed=7)
    for one in ranks:
        one.closed = True
    reports = {one.place.rank: ProcessReport.of("node-0", copied(one.shown())) for one in ranks}
    numbers = Numbers()
    numbers.add(reports.values())
    membership = Membership.gather(reports.values(), numbers)
    shown = {me: report_for_cut(report, me, membership) for me, report in reports.items()}
    for one in ranks * 10:
        me = one.place.rank
        thread, _ = one.place.step[one.at % len(one.place.step)]
        world = one.place.comm(0)
        one.permissions = [(thread, (world, scale_job.COLLECTIVE, -1), 1 << 20, one.passed + random.randrange(40))]
        now = ProcessReport.of("node-0", copied(one.shown()))
        now.gate.communicators[random.randrange(10)].users.append(random.randrange(11, 15))
        changed = only_counts(reports[me].gate, now.gate)
        assert changed is not None
        shown[me] = updated(shown[me], now, changed, me, membership)
        assert shown[me] == report_for_cut(now, me, membership)
        reports[me] = now
