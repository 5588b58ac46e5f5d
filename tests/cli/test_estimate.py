"""The prediction of a pause: from built-in numbers, from earlier moves, and what `check`, `move` and `history` make of it."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.estimate import GIB, PHASES, Estimate, Sample, Size, predict
from snapshotd.api import snapshotd_pb2 as pb
from tests.cli.conftest import MOVE, Migrator, a_rank, a_record
from tests.cli.fake_daemon import FakeCluster

HERE, THERE, ELSEWHERE = "node-1", "spare-1", "node-2"


def a_sample(host_gib: float, ended_s: float = 0.0, nodes: tuple[str, str] = (HERE, THERE), **phases: float) -> Sample:
    return Sample(frozenset(nodes), Size(int(host_gib * GIB)), phases, ended_s)


def seconds(estimate: Estimate) -> dict[str, float]:
    return {part.name: round(part.seconds, 3) for part in estimate.parts}


def test_without_earlier_moves_built_in_numbers_count() -> None:
    small, large = (predict(Size(gib * GIB), HERE, THERE, []) for gib in (1, 8))
    assert small.pause_s == pytest.approx(
        sum(law.seconds(Size(GIB)) for law in PHASES.values() if not law.only_with_nccl)
    )
    assert large.pause_s - small.pause_s == pytest.approx(7 * (0.9 + 0.6))
    assert (small.samples, "no earlier move" in small.basis) == (0, True)


def test_phases_of_nccl_and_gpus_count_only_where_they_are() -> None:
    plain, nccl, gpu = (predict(size, HERE, THERE, []) for size in (Size(0), Size(0, nccl=True), Size(0, GIB)))
    assert nccl.pause_s == pytest.approx(
        plain.pause_s + sum(law.fixed_s for law in PHASES.values() if law.only_with_nccl)
    )
    assert gpu.pause_s > plain.pause_s + 1
    assert [part.name for part in plain.parts] == ["freeze", "stream", "restore", "re-point", "commit", "activate"]


def test_earlier_moves_of_one_size_change_the_fixed_part_and_keep_the_slope() -> None:
    samples = [a_sample(1, stream=took, restore=1.0) for took in (1.2, 1.3, 9.0)]  # one was disturbed
    found = seconds(predict(Size(2 * GIB), HERE, THERE, samples))
    assert found["stream"] == pytest.approx(1.3 + 0.9)
    assert found["restore"] == pytest.approx(1.0 + 0.6)
    assert found["freeze"] == PHASES["freeze"].fixed_s  # nothing is known of it


def test_earlier_moves_of_several_sizes_give_the_slope() -> None:
    samples = [a_sample(gib, stream=0.1 + 0.25 * gib) for gib in (1, 2, 4, 8)]
    assert seconds(predict(Size(16 * GIB), HERE, THERE, samples))["stream"] == pytest.approx(0.1 + 0.25 * 16)


def test_nodes_that_are_faster_than_the_built_in_numbers_have_no_negative_times() -> None:
    samples = [a_sample(8, stream=0.8)]
    assert seconds(predict(Size(16 * GIB), HERE, THERE, samples))["stream"] == pytest.approx(1.6)
    assert seconds(predict(Size(0), HERE, THERE, samples))["stream"] == 0


def test_moves_between_the_same_nodes_count_before_those_with_others() -> None:
    between, touching = a_sample(1, stream=2.0), a_sample(1, nodes=(HERE, ELSEWHERE), stream=5.0)
    strange = a_sample(1, nodes=("node-8", "node-9"), stream=99.0)
    assert seconds(predict(Size(GIB), THERE, HERE, [touching, between, strange]))["stream"] == 2.0
    other = predict(Size(GIB), HERE, "spare-2", [touching, strange])
    assert (seconds(other)["stream"], other.basis) == (5.0, "from 1 earlier move of these nodes with others")


def test_moves_of_ranks_with_a_gpu_do_not_count_for_those_without() -> None:
    gpu = Sample(frozenset((HERE, THERE)), Size(GIB, GIB), {"stream": 50.0}, 0.0)
    assert predict(Size(GIB), HERE, THERE, [gpu]).samples == 0
    assert predict(Size(GIB, GIB), HERE, THERE, [gpu]).samples == 1


# ---------------------------------------------------------------- the commands


def timed(stream_s: float, **fields: Any) -> pb.MoveRecord:
    timing = pb.Timing(phases=[pb.Part(name="stream", seconds=stream_s)], host_bytes=GIB)
    return a_record("source", ended_unix_s=1.0, pause_s=3.0, timing=timing, **fields)


def test_check_estimate_uses_the_journals_of_both_nodes(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].moves = [timed(7.0)]
    ran = migrator("check", "--rank", "0", "--to", "spare-1", "--estimate", "--json")
    assert ran.code == 0, ran.err
    found = ran.json["estimate"]
    assert (found["samples"], found["basis"]) == (1, "from 1 earlier move between node-1 and spare-1")
    assert found["pause_s"] == pytest.approx(sum(part["seconds"] for part in found["parts"]), abs=0.001)
    assert {part["name"]: part["seconds"] for part in found["parts"]}["stream"] > 5
    shown = migrator("check", "--rank", "0", "--to", "spare-1", "--estimate").out
    assert "predicted pause: " in shown
    assert "restore" in shown
    assert "estimate" not in migrator("check", "--rank", "0", "--to", "spare-1", "--json").json


def test_a_move_stores_its_prediction_and_its_phases(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    result = migrator("move", "--rank", "0", "--to", "spare-1", "--json").json
    (told,) = [request for method, request in cluster["node-1"].asked if method == "Release"]
    assert told.timing.predicted_s == pytest.approx(result["predicted_s"], abs=0.001)
    assert told.timing.predicted_s > 0
    assert [part.name for part in told.timing.phases] == [
        "freeze",
        "stream",
        "restore",
        "re-point",
        "commit",
        "activate",
    ]


def test_a_move_whose_nodes_tell_no_times_goes_on(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    for daemon in cluster.daemons.values():
        daemon.unknown.add("ListMoves")
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "moved")


def test_history_says_how_wrong_the_prediction_was(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [timed(1.0, outcome=pb.COMMIT, predicted_s=2.4, mark="settled")]
    (move,) = migrator("history", "--json").json["moves"]
    assert (move["move"], move["pause_s"], move["predicted_s"]) == (MOVE, 3.0, 2.4)
    assert "2.4 s (-20 %)" in migrator("history").out
