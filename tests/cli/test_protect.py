"""What `migrator protect` takes for a reason to roll a job back, and what it does not."""

from __future__ import annotations

from typing import Any

from migrator.find_rank import Found
from migrator.jobs.finding import JobEntry
from migrator.jobs.homes import check_after_loss, was_rebooted
from migrator.jobs.protect import LOST_S, Protection, Sight, failure, is_suspended
from migrator.jobs.recall import Recalled, recall
from migrator.jobs.tries import Tries
from snapshotd.api import snapshotd_pb2 as pb
from tests.cli.found_ranks import AWAY, SUSPENDED, rank


def test_job_that_runs_has_no_trouble() -> None:
    sight = Sight()
    for second in range(20):
        assert sight.trouble([rank(0, "a"), rank(1, "b")], {}, second) == ""


def test_failed_rank_is_trouble_at_once() -> None:
    assert Sight().trouble([rank(0, "a"), rank(1, "b", failed=9)], {}, 0) == "rank 1 on b failed (killed by signal 9)"
    assert failure(3 << 8) == "exit status 3"


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


def test_rank_that_no_node_knows_has_ended_or_its_node_was_booted() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 0)
    assert sight.forgotten([rank(0, "a"), rank(1, "b")], {}) == {}
    assert sight.forgotten([rank(0, "a")], {"b": "silent"}) == {}
    assert sight.forgotten([rank(0, "a")], {}) == {1: "b"}


async def test_only_a_node_that_was_booted_since_the_last_snapshot_has_lost_its_rank() -> None:
    """A rank whose launcher was lost with its home node, earlier, may end well on another one."""
    nothing: Any = None
    protection = Protection(nothing, nothing, 60.0, 3, print)
    boots = {"a": "1", "b": "1"}

    async def now() -> dict[str, str]:
        return boots

    protection._boots = now  # type: ignore[method-assign]
    protection.boots = dict(boots)
    gone = Found("b", pb.Rank(uid="job-1", rank=1, place=pb.Rank.HERE, home_node="a", home_boot_id="0"))
    protection.sight.trouble([rank(0, "a"), gone], {}, 0)
    forgotten = protection.sight.forgotten([rank(0, "a")], {})
    assert await protection._rebooted(forgotten) == ("", "")
    boots["b"] = "2"
    assert await protection._rebooted(forgotten) == ("b", "b was booted, and rank 1 has ended with it")
    assert await protection._rebooted({}) == ("", "")


def test_home_node_that_was_booted_since_is_noticed() -> None:
    started = pb.Rank(home_node="b", home_boot_id="first")
    assert not was_rebooted(started, {"b": pb.NodeInfo(boot_id="first")})
    assert was_rebooted(started, {"b": pb.NodeInfo(boot_id="second")})
    assert not was_rebooted(started, {}), "it does not answer"
    assert not was_rebooted(pb.Rank(home_node="b"), {"b": pb.NodeInfo(boot_id="second")}), "from an older version"


def test_launcher_that_was_lost_with_its_node_does_not_keep_the_job_from_being_rolled_back() -> None:
    started = pb.Rank(uid="job-1", home_node="b")
    assert check_after_loss(started, {"b": set()}, {}, ()).verdict == pb.Check.REFUSE
    assert check_after_loss(started, {"b": set()}, {}, {"b"}).verdict == pb.Check.WARN


def entry(record: str, kind: str, uids: list[str], **more: Any) -> JobEntry:
    parts = [pb.Participant(rank_uid=uid, node=f"node-of-{uid}") for uid in uids]
    return JobEntry("a", pb.JobRecord(record=record, kind=kind, participants=parts, outcome=pb.COMMIT, **more))


def test_protection_that_is_started_again_knows_the_ranks_and_a_rollback_that_waits() -> None:
    snapshot = entry("m-2", "snapshot", ["x", "y"])
    waiting = entry("m-3", "rollback", ["x", "y"])
    nodes = {"x": "node-of-x", "y": "node-of-y"}
    assert recall([], ["x"]) is None
    assert recall([snapshot], ["x"]) == Recalled(nodes)
    assert recall([snapshot], []) == Recalled(nodes)
    assert recall([waiting, snapshot], ["x"]) == Recalled(nodes, "m-3")
    assert recall([entry("m-3", "rollback", ["x", "y"], ended_by="m-4"), snapshot], ["x"]) == Recalled(nodes)
    assert recall([snapshot], ["z"]) is None, "of an earlier job with the same name"
    seen = Sight(nodes=nodes)
    assert seen.trouble([], {"node-of-x": "silent"}, 0) == ""
    assert seen.trouble([], {"node-of-x": "silent"}, LOST_S) == "node-of-x lost (does not answer)"


def test_failure_that_comes_back_is_passed_on_although_there_are_snapshots_in_between() -> None:
    """The job fails 8 s after each rollback; snapshots are taken every 3 s."""
    tries, now_s = Tries(3), 0.0
    tries.snapshot(now_s)
    for _ in range(3):
        for _ in range(2):
            now_s += 3
            tries.snapshot(now_s)
        now_s += 2
        assert tries.failed(now_s)
        now_s += 5
        tries.rolled_back(now_s)
    assert not tries.failed(now_s + 8)


def test_job_that_runs_for_longer_than_before_counts_as_well_again() -> None:
    tries = Tries(1)
    tries.snapshot(0)
    assert tries.failed(20)
    tries.rolled_back(30)
    tries.snapshot(60)
    assert not tries.failed(61), "it may be the same failure"
    tries.snapshot(71)
    assert tries.failed(80)


def test_protection_that_stands_by_takes_over_when_the_home_node_of_rank_0_is_lost() -> None:
    sight = Sight()
    ranks = [rank(0, "a"), rank(1, "b")]
    assert not sight.first_is_lost(ranks, {"c": "silent"}, 0)
    assert not sight.first_is_lost(ranks[1:], {"a": "silent"}, 1)
    assert not sight.first_is_lost(ranks, {}, 5), "it answers again"
    assert not sight.first_is_lost(ranks[1:], {"a": "silent"}, 6)
    assert sight.first_is_lost(ranks[1:], {"a": "silent"}, 6 + LOST_S)
    assert sight.first_home == "a"


def test_time_for_which_the_job_was_down_begins_when_it_was_last_seen_well() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 5)
    sight.trouble([rank(0, "a")], {"b": "silent"}, 6)
    assert sight.trouble([rank(0, "a")], {"b": "silent"}, 6 + LOST_S)
    assert sight.well_s == 5


def test_suspended_job_has_no_trouble_however_long_it_is() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 0)
    suspended = [rank(0, "a", SUSPENDED), rank(1, "b", SUSPENDED), rank(1, "home", AWAY)]
    for second in (1, 2 + LOST_S, 1000):
        assert sight.trouble(suspended, {}, second) == ""
        assert sight.trouble(suspended[:1], {"b": "silent"}, second) == "", "the image of rank 1 is there"
    resumed = [rank(0, "a"), rank(1, "c"), rank(1, "home", AWAY)]
    assert sight.trouble(resumed, {}, 1001) == ""
    assert sight.trouble(resumed[:1], {"c": "silent"}, 1002) == ""
    assert sight.trouble(resumed[:1], {"c": "silent"}, 1002 + LOST_S) == "c lost (does not answer)"


def test_images_of_an_earlier_job_with_the_same_name_do_not_make_a_job_suspended() -> None:
    earlier = Found("a", pb.Rank(uid="earlier-0", job="job", rank=0, place=SUSPENDED))
    assert not is_suspended([rank(0, "a"), earlier])
    assert is_suspended([earlier])
    assert is_suspended([rank(0, "a"), rank(1, "b", SUSPENDED)]), "it is being resumed"
    assert not is_suspended([rank(0, "a"), rank(0, "b", SUSPENDED)]), "the image is about to be dropped"
    assert not is_suspended([])
