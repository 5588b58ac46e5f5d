"""A rollback from another copy, if an image does not reach its target: which nodes are asked, how often, and what is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from migrator import jobs
from migrator.driver.reporter import note
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, UnreadableImage, UnsentImage
from migrator.jobs import places, protect
from migrator.jobs.protect import Protection
from migrator.results import Event
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Full, Internal, NotFound, SnapshotError, Timeout, Undone, Unreachable
from tests.cli.kept_copies import PARTS, Cluster, use

SILENT = Unreachable("node-1 does not answer node-3")


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)


def of(node: str, error: SnapshotError) -> SnapshotError:
    """As a client raises it."""
    error.of_node = node
    return error


@pytest.mark.parametrize("error", [SILENT, Timeout("60 s"), Damaged("no"), NotFound("dropped"), Internal("bug")])
async def test_next_copy_is_used_and_what_failed_is_named(error: SnapshotError) -> None:
    cluster = Cluster()
    cluster.errors["send", "own-0"] = error
    result = await cluster.back()
    assert (result.outcome, cluster.used) == (JobVerdict.RESUMED, ["copy-0", "own-1"])
    assert len(set(cluster.records)) == len(cluster.records) == 2, "another attempt, with moves of its own"
    assert result.to_json()["unsent_images"] == [
        {"rank": 0, "node": "node-1", "image": "own-0", "target": "node-1", "reason": error.message}
    ]
    assert result.unreadable_images == []
    assert cluster.notes == [
        f"rank 0: the image on node-1 did not reach node-1: {error.message}",
        "rank 0: using the image on node-2 now",
    ]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("prepare", of("node-1", Unreachable("no certificate can be read"))),
        ("send", of("node-1", Timeout("the disk of node-1 does not answer"))),
        ("send", of("node-1", Internal("bug"))),
        ("send", Unreachable("node-1 does not answer the driver")),
        ("send", of("node-3", Damaged("a chunk arrived damaged"))),
    ],
)
async def test_next_copy_is_used_if_the_node_with_the_image_has_failed_or_the_way_from_it(
    call: str, error: SnapshotError
) -> None:
    cluster = Cluster()
    cluster.errors[call, "own-0"] = error
    result = await cluster.back(on={0: "node-3"})
    assert (result.outcome, cluster.used) == (JobVerdict.RESUMED, ["copy-0", "own-1"])
    assert [(one.image, one.target) for one in result.unsent_images] == [("own-0", "node-3")]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("prepare", of("node-3", Internal("bug"))),
        ("prepare", of("node-3", Unreachable("the coordinator does not answer node-3"))),
        ("prepare", Timeout("node-3 did not answer Prepare in time")),
        ("send", of("node-3", Timeout("the disk of node-3 has written nothing of the image"))),
        ("send", of("node-3", NotFound("no such move"))),
        ("send", of("node-3", Internal("bug"))),
        ("restore", of("node-3", Timeout("criu"))),
    ],
)
async def test_fault_of_the_target_is_not_counted_against_an_image(call: str, error: SnapshotError) -> None:
    """Other copies would fail in the same way, and all of them would seem to be of no use."""
    cluster = Cluster()
    cluster.errors[call, "own-0"] = error
    result = await cluster.back(on={0: "node-3"})
    assert (result.outcome, result.error_code, result.reason) == (JobVerdict.UNDONE, error.code, error.message)
    assert (len(cluster.records), result.unsent_images) == (1, [])


async def test_fault_of_a_target_that_has_the_image_itself_is_not_counted_against_it() -> None:
    cluster = Cluster()
    cluster.errors["prepare", "own-0"] = of("node-1", Internal("bug"))
    result = await cluster.back()
    assert (result.outcome, len(cluster.records), result.unsent_images) == (JobVerdict.UNDONE, 1, [])


async def test_all_images_that_do_not_arrive_are_found_in_one_attempt() -> None:
    cluster = Cluster(copy_1="read")
    cluster.errors = {("send", "own-0"): SILENT, ("send", "own-1"): SILENT, ("send", "copy-0"): SILENT}
    result = await cluster.back()
    assert (result.outcome, cluster.used) == (JobVerdict.RESUMED, ["more-0", "more-1"])
    assert [one.image for one in result.unsent_images] == ["own-0", "copy-0", "own-1"]
    assert [one.image for one in result.unreadable_images] == ["copy-1"]
    assert len(cluster.records) == 3


async def test_each_image_is_tried_once_and_the_next_rollback_begins_again() -> None:
    cluster = Cluster()
    cluster.errors = {("send", image): Timeout(f"{image} waited") for image in ("own-1", "copy-1", "more-1")}
    result = await cluster.back()
    assert (result.outcome, result.error_code) == (JobVerdict.UNDONE, "timeout")
    tried = [image for call, image in cluster.asked if call == "send" and image[-1] == "1"]
    assert tried == ["own-1", "copy-1", "more-1"]
    for node, image in (("node-2", "own-1"), ("node-1", "copy-1"), ("node-3", "more-1")):
        assert f"rank 1: the image on {node} did not reach node-2: {image} waited" in result.reason
    del cluster.errors["send", "own-1"]
    assert (await cluster.back()).outcome is JobVerdict.RESUMED
    assert cluster.used == ["own-0", "own-1"]


@pytest.mark.parametrize(("silent", "error"), [("node-1", SILENT), ("", Full("node-1 has no room"))])
async def test_failure_of_the_target_ends_the_attempt(silent: str, error: SnapshotError) -> None:
    """Other copies would fail in the same way."""
    cluster = Cluster()
    cluster.silent = {silent}
    cluster.errors["send", "own-0"] = error
    result = await cluster.back()
    assert (result.outcome, result.error_code, result.reason) == (JobVerdict.UNDONE, error.code, error.message)
    assert (len(cluster.records), result.unsent_images) == (1, [])


async def test_failure_of_another_target_ends_the_attempt() -> None:
    cluster = Cluster(own_0="send")
    cluster.errors["send", "own-1"] = Full("node-2 has no room")
    result = await cluster.back()
    assert (result.outcome, result.error_code, len(cluster.records)) == (JobVerdict.UNDONE, "full", 1)


async def test_failure_to_restore_is_not_one_of_the_node_that_has_sent_the_image() -> None:
    cluster = Cluster()
    cluster.errors["restore", "own-0"] = Damaged("the image that has arrived cannot be read")
    result = await cluster.back()
    assert (result.outcome, len(cluster.records), result.unsent_images) == (JobVerdict.UNDONE, 1, [])


@pytest.mark.parametrize("kind", ["gone", "unreadable"])
async def test_rollback_ends_if_no_other_image_can_be_had(kind: str) -> None:
    cluster = Cluster(**({} if kind == "gone" else {"copy_0": "read", "more_0": "read"}))
    cluster.lost = {"copy-0", "more-0"} if kind == "gone" else set()
    cluster.errors["send", "own-0"] = SILENT
    result = await cluster.back()
    assert (result.outcome, result.error_code) == (JobVerdict.UNDONE, "unreachable")
    assert Counter(cluster.asked)["send", "own-0"] == 2, "the second time, because no other one was there"
    assert len(result.unreadable_images) == (0 if kind == "gone" else 2)


async def test_attempt_that_cannot_begin_does_not_hide_what_those_before_have_found() -> None:
    class Losing(Cluster):
        def _fail(self, call: str, image: str) -> None:
            if (call, image) == ("send", "own-0"):
                self.lost = {"own-0", "copy-0", "more-0"}
                raise SILENT
            super()._fail(call, image)

    cluster = Losing(own_1="send")
    result = await cluster.back()
    assert (result.outcome, result.error_code) == (JobVerdict.UNDONE, "not-found")
    assert result.reason == "node-1 does not answer node-3; tried again: no image own-0"
    assert (result.exit_code, result.state) == (Undone.exit_code, "suspended; its images are whole")
    assert [one.image for one in result.unsent_images] == ["own-0"]
    assert [one.image for one in result.unreadable_images] == ["own-1"]
    assert (len(cluster.records), result.record) == (1, cluster.records[0])


async def test_first_attempt_that_cannot_begin_is_an_error() -> None:
    cluster = Cluster()
    cluster.lost = {"own-0", "copy-0", "more-0"}
    with pytest.raises(NotFound, match="no image more-0"):
        await cluster.back()


async def test_job_with_one_image_of_each_rank_is_tried_once() -> None:
    suspended = [pb.Participant(rank_uid=p.rank_uid, rank=p.rank, move=p.move, node=p.node) for p in PARTS]
    cluster = Cluster()
    cluster.errors["send", "own-0"] = SILENT
    record = pb.JobRecord(record="m-00000000000b", job="night", user_id=7, kind="rollback", participants=suspended)
    result = await cluster.back(record=record)
    assert (result.outcome, result.reason, len(cluster.records)) == (JobVerdict.UNDONE, SILENT.message, 1)


async def test_protection_says_at_once_which_image_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first, second = (
        UnsentImage(0, "node-1", "own-0", "cut", "node-3"),
        UnreadableImage(1, "node-2", "own-1", "worn out"),
    )

    async def rollback(cluster: Any, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
        on_event(note(first.text))
        on_event(note("rank 0: using the image on node-2 now"))
        assert said[-2:] == [first.text, "rank 0: using the image on node-2 now"]
        bad: Any = {"unsent_images": [first], "unreadable_images": [second]}
        return JobResult("m-1", "night", 7, "node-1", JobVerdict.ROLLED_BACK, [], 1.0, **bad)

    async def nothing(*_: object) -> tuple[list[Any], dict[str, str]]:
        return [], {}

    cluster: Any = Cluster()
    protection = Protection(cluster, JobOptions("night"), 60.0, 3, said.append)
    monkeypatch.setattr(protection, "_boots", nothing)
    monkeypatch.setattr(protect, "all_rollbacks", nothing)
    monkeypatch.setattr(jobs, "rollback", rollback)
    await protection._roll_back("node-1 lost")
    assert [said.count(one.text) for one in (first, second)] == [1, 1], said


def test_images_that_did_not_arrive_are_asked_for_last() -> None:
    kept = [pb.ImageCopy(move=f"m-{node}", node=node) for node in "abc"]
    assert [one.node for one in places.in_order(kept, {"a", "b"}, (), {"m-a"})] == ["b", "c", "a"]
    assert [one.node for one in places.in_order(kept, {"a", "b"}, {"m-b"}, {"m-a"})] == ["c", "a"]


def test_another_attempt_is_made_only_if_every_rank_has_another_image() -> None:
    kept = {0: ["a", "b"], 1: ["c"]}
    assert not places.goes_on([], kept, [], []), "the attempt has failed for another reason"
    assert places.goes_on([(0, "a")], kept, [], ["a"])
    assert not places.goes_on([(0, "b")], kept, [], ["a", "b"])
    assert not places.goes_on([(0, "a"), (1, "c")], kept, [], ["a", "c"])
    assert not places.goes_on([(0, "a")], kept, [], ["a", "a"]), "the node with the other one did not answer"
    assert not places.goes_on([(0, "a")], kept, ["b"], ["a"])
    assert places.goes_on([(1, "c")], kept, ["c"], []), "the next attempt says that there is none"
