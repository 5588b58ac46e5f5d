"""What `migrator protect` takes for a reason to roll a job back, and what it does not."""

from __future__ import annotations

from typing import Any

from migrator.find_rank import Found
from migrator.jobs.interval import best
from migrator.jobs.protect import LOST_S, Protection, Sight, described
from snapshotd.api import snapshotd_pb2 as pb


def rank(number: int, node: str, place: pb.Rank.Place.ValueType = pb.Rank.HERE, failed: int | None = None) -> Found:
    return Found(node, pb.Rank(uid=f"job-{number}", job="job", rank=number, place=place, failed=failed))


def test_job_that_runs_has_no_trouble() -> None:
    sight = Sight()
    for second in range(20):
        assert sight.trouble([rank(0, "a"), rank(1, "b")], {}, second) == ""


def test_failed_rank_is_trouble_at_once() -> None:
    assert Sight().trouble([rank(0, "a"), rank(1, "b", failed=9)], {}, 0) == "rank 1 on b failed (killed by signal 9)"
    assert described(3 << 8) == "exit status 3"


def test_node_that_does_not_answer_for_long_is_lost() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 0)
    assert sight.trouble([rank(0, "a")], {"b": "silent"}, 1) == ""
    assert sight.trouble([rank(0, "a"), rank(1, "b")], {}, 2) == "", "it answers again"
    assert sight.trouble([rank(0, "a")], {"b": "silent"}, 3) == ""
    assert sight.trouble([rank(0, "a")], {"b": "silent"}, 3 + LOST_S) == "b lost (does not answer)"


def test_rank_that_moves_is_not_lost() -> None:
    sight = Sight()
    sight.trouble([rank(1, "b")], {}, 0)
    assert sight.trouble([rank(1, "b", pb.Rank.AWAY)], {}, 1) == ""
    assert sight.trouble([rank(1, "b", pb.Rank.AWAY), rank(1, "c")], {}, 2) == ""
    assert sight.trouble([rank(1, "b", pb.Rank.AWAY), rank(1, "c")], {}, 2 + LOST_S) == ""


def test_rank_that_has_ended_is_no_trouble() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 0)
    for second in range(1, 20):
        assert sight.trouble([rank(0, "a")], {}, second) == "", (
            "no node knows it any more: it ended, as its launcher knows"
        )
    assert not sight.has_ended([rank(0, "a")], {})
    assert not sight.has_ended([], {"b": "silent"})
    assert sight.has_ended([], {})


def test_interval_is_computed_from_the_pause_and_announced_when_it_changes() -> None:
    said: list[str] = []
    nothing: Any = None
    protection = Protection(nothing, nothing, None, 3, said.append, node_mtbf_s=1000 * 3600.0)
    ranks = [rank(0, "a"), rank(1, "b"), rank(1, "home", pb.Rank.AWAY)]
    for pause_s in (1.0, 1.1, 4.0):
        assert protection._until_next(ranks, pause_s) == best(pause_s, 2, 1000 * 3600.0).every_s
    assert len(said) == 2
    assert said[0].startswith("a snapshot every 1")
    assert "every 500.0 h on average" in said[0]
    assert Protection(nothing, nothing, 60.0, 3, said.append)._until_next(ranks, 1.0) == 60.0
