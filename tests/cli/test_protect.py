"""What `migrator protect` takes for a reason to roll a job back, and what it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from migrator.cli import protect as cli
from migrator.find_rank import Found
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, RankPlace
from migrator.jobs import protect
from migrator.jobs.finding import JobEntry
from migrator.jobs.homes import check_after_loss, was_rebooted
from migrator.jobs.interval import best
from migrator.jobs.postponing import BELIEVED_S, MEASURED, Postponing
from migrator.jobs.protect import LOST_S, Protection, Sight, failure, is_suspended
from migrator.jobs.recall import Recalled, recall
from migrator.jobs.tries import Tries
from snapshotd.api import snapshotd_pb2 as pb
from tests.cli.conftest import FakeCluster, Migrator


def rank(number: int, node: str, place: pb.Rank.Place.ValueType = pb.Rank.HERE, failed: int | None = None) -> Found:
    return Found(node, pb.Rank(uid=f"job-{number}", job="job", rank=number, place=place, failed=failed))


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


def test_protection_that_stands_by_takes_over_when_the_home_node_of_rank_0_is_lost() -> None:
    sight = Sight()
    ranks = [rank(0, "a"), rank(1, "b")]
    assert not sight.first_is_lost(ranks, {"c": "silent"}, 0)
    assert not sight.first_is_lost(ranks[1:], {"a": "silent"}, 1)
    assert not sight.first_is_lost(ranks, {}, 5), "it answers again"
    assert not sight.first_is_lost(ranks[1:], {"a": "silent"}, 6)
    assert sight.first_is_lost(ranks[1:], {"a": "silent"}, 6 + LOST_S)
    assert sight.first_home == "a"


def test_reason_why_there_is_no_snapshot_is_said_once() -> None:
    said: list[str] = []
    nothing: Any = None
    protection = Protection(nothing, nothing, 60.0, 3, said.append)
    for why in ("off", "off", "full", "off"):
        protection._no_snapshot(why)
    assert said == [f"no snapshot was taken: {why}" for why in ("off", "full", "off")]


class Booted(Protection):
    """A job of two ranks. When it is rolled back the node of one of them is booted before anyone has seen the rank there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, boots: dict[str, str], *, stands_by: bool = False) -> None:
        nothing: Any = None
        self.said: list[str] = []
        super().__init__(nothing, JobOptions("job"), 60.0, 3, self.said.append, stands_by=stands_by, first_s=1e9)
        self.ranks, self.boots_now, self.recalled, self.looks = [rank(0, "a"), rank(1, "b")], boots, True, 0
        monkeypatch.setattr(protect, "LOOK_S", 0.001)
        monkeypatch.setattr("migrator.jobs.rollback", self._rolled_back)
        for records in ("all_rollbacks", "all_jobs"):
            monkeypatch.setattr(protect, records, self._no_records)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        self.looks += 1
        return self.ranks, {}

    async def _boots(self) -> dict[str, str]:
        return dict(self.boots_now)

    async def _rolled_back(self, *_: object) -> JobResult:
        places = [RankPlace(0, "job-0", "a"), RankPlace(1, "job-1", "b")]
        if len([one for one in self.said if "rolling the job back" in one]) == 1:
            self.boots_now["b"] = "2"
            self.ranks = [rank(0, "a")]
        else:
            self.ranks = [rank(0, "a"), rank(1, "b")]
        return JobResult("m-1", "job", 0, "a", JobVerdict.ROLLED_BACK, places, 1.0)

    @staticmethod
    async def _no_records(_: object) -> tuple[list[Any], dict[str, Any]]:
        return [], {}

    async def until_said(self, text: str) -> None:
        running = asyncio.create_task(self.run())
        async with asyncio.timeout(30):
            while not running.done() and not any(text in one for one in self.said):  # noqa: ASYNC110 - what is tested looks by itself
                await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert any(text in one for one in self.said), self.said


async def test_node_that_is_booted_at_the_end_of_a_rollback_has_the_job_rolled_back_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protection = Booted(monkeypatch, {"a": "1", "b": "1"})
    protection.ranks = [rank(0, "a"), rank(1, "b", failed=9)]
    await protection.until_said("b was booted, and rank 1 has ended with it: rolling the job back")


async def test_protection_that_stands_by_takes_over_when_the_first_node_was_booted_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protection = Booted(monkeypatch, {"a": "1", "b": "1"}, stands_by=True)
    watched = asyncio.create_task(protection.until_said("a was booted, and rank 0 has ended with it: rolling the job"))
    while protection.looks < 2:  # noqa: ASYNC110 - what is tested looks by itself
        await asyncio.sleep(0.001)
    protection.ranks, protection.boots_now["a"] = [rank(1, "b")], "2"
    await watched
    assert "a, where the job was protected from, was booted: taking over" in protection.said


class Scene(Protection):
    """A job of two ranks, of which a snapshot is taken that waits, and whose undo waits too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, 60.0, 3, lambda text: None)
        self.taken, self.undone = asyncio.Event(), asyncio.Event()
        self.ranks, self.silent, self.looks = [rank(0, "a"), rank(1, "b")], dict[str, object](), 0
        monkeypatch.setattr(protect, "LOOK_S", 0.001)
        monkeypatch.setattr(protect, "UNDO_S", 0.001)
        monkeypatch.setattr(protect, "BUSY_LOST_S", 1e9)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        self.looks += 1
        return self.ranks, self.silent

    async def _take(self) -> float | None:
        try:
            await self.taken.wait()
        except asyncio.CancelledError:
            await self.undone.wait()
            return None
        return 1.5

    async def seen(self, times: int) -> None:
        """Waits until it has looked so many times more."""
        until = self.looks + times
        while self.looks < until:  # noqa: ASYNC110 - what is tested looks by itself
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("loss", ["a rank fails", "a node is silent"])
async def test_snapshot_is_given_up_when_the_job_must_be_rolled_back(
    monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Its undo may wait for the lost node: that does not keep the job from being rolled back."""
    scene = Scene(monkeypatch)
    taking = asyncio.create_task(scene._take_unless_lost())
    await scene.seen(2)
    if loss == "a rank fails":
        scene.ranks = [rank(0, "a"), rank(1, "b", failed=9)]
    else:
        scene.ranks, scene.silent = [rank(0, "a")], {"b": "silent"}
        await scene.seen(3)
        assert not taking.done(), "not yet: all nodes are busy with the snapshot"
        monkeypatch.setattr(protect, "BUSY_LOST_S", 0.0)
    assert await taking is None
    (left,) = scene._undoing
    scene.undone.set()
    assert await left is None


async def test_snapshot_of_a_job_that_is_well_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    taking = asyncio.create_task(scene._take_unless_lost())
    await scene.seen(3)
    scene.taken.set()
    assert await taking == 1.5


async def test_snapshot_waits_while_the_file_of_the_job_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene, file, said = Scene(monkeypatch), tmp_path / "evaluating", list[str]()
    scene.postponing, scene.say = Postponing(file), said.append
    scene.taken.set()
    file.touch()
    assert await scene._take_or_postpone(scene.ranks) is None
    assert await scene._take_or_postpone(scene.ranks) is None
    assert said == [f"no snapshot was taken: {file} exists"]
    file.unlink()
    assert await scene._take_or_postpone(scene.ranks) == 1.5


async def test_snapshot_that_would_pause_the_job_for_too_long_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, said, now_s = Scene(monkeypatch), list[str](), [0.0]
    scene.postponing, scene.say = Postponing(max_pause_s=2.0, clock=lambda: now_s[0]), said.append
    scene.taken.set()

    async def taken(largest_bytes: int) -> bool:
        scene.ranks[1].rank.memory_bytes, scene.ranks[1].rank.device_bytes = 100, largest_bytes - 100
        return await scene._take_or_postpone(scene.ranks) == 1.5

    assert await taken(150), "the first one, and its pause is measured"
    assert await taken(200), "2 s are expected"
    assert not await taken(300), "1.5 s were measured with 200 bytes"
    assert not await taken(290)
    (only,) = said
    assert only.startswith(
        "no snapshot was taken: it would pause the job for longer than 2 s (--max-pause); the one before"
    )
    assert await taken(100)
    now_s[0] = BELIEVED_S + 1
    assert await taken(300), "what was measured is not believed for ever"


def test_one_long_pause_among_others_puts_nothing_off() -> None:
    postponing, ranks = Postponing(max_pause_s=2.0), [rank(0, "a")]
    ranks[0].rank.memory_bytes = 100
    for pause_s in (1.0, 9.0):
        postponing.measured(pause_s, ranks)
        assert not postponing.why(ranks)
    for _ in range(MEASURED):
        postponing.measured(9.0, ranks)
    assert postponing.why(ranks)


def test_options_of_the_protection_have_defaults_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, migrator: Migrator, cluster: FakeCluster
) -> None:
    found: list[Postponing] = []

    class Seen(Protection):
        async def run(self) -> int:
            found.append(self.postponing)
            return 0

    monkeypatch.setattr(protect, "Protection", Seen)
    assert migrator("protect", "night").code == 0
    monkeypatch.setenv(cli.MAX_PAUSE, "")
    monkeypatch.setenv(cli.UNLESS_FILE, "")
    assert migrator("protect", "night").code == 0
    monkeypatch.setenv(cli.MAX_PAUSE, "2.5")
    monkeypatch.setenv(cli.UNLESS_FILE, "/shared/evaluating")
    assert migrator("protect", "night").code == 0
    assert migrator("protect", "night", "--max-pause", "1").code == 0
    shared = Path("/shared/evaluating")
    assert found == [Postponing(), Postponing(), Postponing(shared, 2.5), Postponing(shared, 1.0)]
    monkeypatch.setenv(cli.MAX_PAUSE, "soon")
    assert migrator("protect", "night").code == 2
    assert len(found) == 4


def test_time_for_which_the_job_was_down_begins_when_it_was_last_seen_well() -> None:
    sight = Sight()
    sight.trouble([rank(0, "a"), rank(1, "b")], {}, 5)
    sight.trouble([rank(0, "a")], {"b": "silent"}, 6)
    assert sight.trouble([rank(0, "a")], {"b": "silent"}, 6 + LOST_S)
    assert sight.well_s == 5


SUSPENDED, AWAY = pb.Rank.SUSPENDED, pb.Rank.AWAY


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


class Interrupted(Protection):
    """A job that is suspended while it is protected. `looks`: what nodes know of it, one after the other; the last one lasts.
    `did`: what was said and done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: list[tuple[list[Found], dict[str, object]]]) -> None:
        nothing: Any = None
        self.did: list[str] = []
        super().__init__(nothing, JobOptions("job"), 0.0, 3, self.did.append)
        self._looks, self.recalled = looks, True
        monkeypatch.setattr(protect, "LOOK_S", 0.0)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    async def _boots(self) -> dict[str, str]:
        return {}

    async def _take_unless_lost(self) -> float | None:
        self.did.append("snapshot")
        return 1.0

    async def _roll_back(self, trouble: str) -> None:
        self.did.append(f"rollback: {trouble}")


async def test_protection_says_that_the_job_is_suspended_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [rank(0, "a"), rank(1, "b")]
    suspended = [rank(0, "a", SUSPENDED), rank(1, "b", SUSPENDED)]
    silent: dict[str, object] = {"a": "silent", "b": "silent"}
    looks = [
        (running, {}),
        *[(suspended, {})] * 3,
        ([], silent),
        (suspended, {}),
        (running, {}),
        (running, {}),
        ([], {}),
    ]
    protection = Interrupted(monkeypatch, looks)
    assert await protection.run() == 0
    waits = "the job is suspended: it is protected again when it is resumed (`migrator job resume job`)"
    resumed = "the job was resumed, and is protected again from its next snapshot on"
    assert protection.did == ["snapshot", waits, resumed, "snapshot", "snapshot", "the job has ended"]


async def test_job_that_fails_after_its_resumption_is_trouble_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [rank(0, "a"), rank(1, "b", failed=9)]
    protection = Interrupted(monkeypatch, [([rank(0, "a", SUSPENDED)], {}), (failed, {}), ([], {})])
    assert await protection.run() == 0
    assert protection.did[1:] == ["rollback: rank 1 on b failed (killed by signal 9)", "the job has ended"]
