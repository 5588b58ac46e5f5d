"""Since when a node counts as silent, for `migrator protect`: since it was asked, not since the answer failed to come."""

from __future__ import annotations

from migrator.find_rank import Found
from migrator.jobs.protect import LOST_S, Sight
from snapshotd.api import snapshotd_pb2 as pb

ASK_S = 5.0


def rank(number: int, node: str) -> Found:
    return Found(node, pb.Rank(uid=f"job-{number}", job="job", rank=number, place=pb.Rank.HERE, home_node=node))


def test_time_that_a_question_took_counts() -> None:
    sight, both = Sight(), [rank(0, "a"), rank(1, "b")]
    sight.trouble(both, {}, 0.1, asked_s=0.0)
    assert sight.trouble(both[:1], {"b": "silent"}, 1 + ASK_S, asked_s=1.0) == ""
    assert sight.trouble(both[:1], {"b": "silent"}, 1 + LOST_S, asked_s=2 + ASK_S) == "b lost (does not answer)"


def test_time_that_a_question_took_counts_for_the_home_of_rank_0() -> None:
    sight, both = Sight(), [rank(0, "a"), rank(1, "b")]
    assert not sight.first_is_lost(both, {}, 0.1, 0.0)
    assert not sight.first_is_lost(both[1:], {"a": "silent"}, 1 + ASK_S, 1.0)
    assert sight.first_is_lost(both[1:], {"a": "silent"}, 1 + LOST_S, 2 + ASK_S)
