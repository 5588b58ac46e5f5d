"""A rollback from another copy, if an image cannot be read: which nodes are asked, and what is said."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, UnreadableImage
from migrator.jobs import places
from migrator.jobs.resume import bring_back
from migrator.jobs.rollback import _places
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError, Unreachable, Unreadable, Where

PARTS = [
    pb.Participant(
        rank_uid=f"night-{rank}",
        rank=rank,
        move=f"own-{rank}",
        node=f"node-{rank + 1}",
        copy=f"copy-{rank}",
        copy_node=f"node-{2 - rank}",
        more_copies=[pb.ImageCopy(move=f"more-{rank}", node="node-3")],
    )
    for rank in (0, 1)
]
RECORD = pb.JobRecord(record="m-00000000000b", job="night", user_id=7, kind="rollback", participants=PARTS)


class Cluster:
    """Three nodes. Images fail at the call that the test names."""

    def __init__(self, **bad: str) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in (1, 2, 3)}
        self.labels: dict[str, dict[str, str]] = {}
        self.bad = {image.replace("_", "-"): call for image, call in bad.items()}
        self.lost: set[str] = set()  # images that their nodes do not have any more
        self.asked: list[tuple[str, str]] = []  # call, image
        self.image_of: dict[str, str] = {}  # by move
        self.records: list[str] = []
        self.running: set[str] = set()  # moves
        self.made_on: dict[str, str] = {}  # by image: what its node says; else the node of the rank
        self.prepared: list[pb.PrepareRequest] = []

    def _fail(self, call: str, image: str) -> None:
        self.asked.append((call, image))
        if image in self.lost:
            raise NotFound(f"no image {image}")
        if self.bad.get(image) == call:
            raise Unreadable(f"the image {image} of rank {image[-1]}: Input/output error")

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        async def image(request: pb.MoveRequest, timeout_s: float) -> pb.StoredImage:
            self._fail("read", request.move)
            rank = int(request.move[-1])
            facts = pb.RankFacts(source_node=self.made_on.get(request.move, f"node-{rank + 1}"))
            facts.rank.CopyFrom(pb.Rank(uid=f"night-{rank}", job="night", rank=rank, user_id=7))
            return pb.StoredImage(facts=facts)

        async def examine(request: pb.ExamineRequest, timeout_s: float) -> pb.ExamineReply:
            return pb.ExamineReply()

        async def begin(request: pb.BeginJobRequest, timeout_s: float) -> pb.BeginJobReply:
            self.records.append(request.record)
            for part in request.participants:
                self.image_of[part.move] = part.image
            return pb.BeginJobReply()

        async def prepare(request: pb.PrepareRequest, timeout_s: float) -> pb.PrepareReply:
            self.prepared.append(request)
            return pb.PrepareReply(nonce=b"nonce")

        async def send(request: pb.SendRequest, timeout_s: float) -> AsyncIterator[pb.Progress]:
            self._fail("send", request.image)
            yield pb.Progress(bytes_sent=3, bytes_expected=3, done=True)

        async def restore(request: pb.MoveRequest, timeout_s: float) -> pb.RestoreReply:
            self._fail("restore", self.image_of[request.move])
            return pb.RestoreReply()

        async def commit(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            return pb.Outcome(kind=pb.COMMIT)

        async def abort(request: pb.AbortRequest, timeout_s: float, retry: bool) -> pb.Outcome:
            return pb.Outcome(kind=pb.ABORT)

        async def activate(request: pb.TokenRequest, timeout_s: float, retry: bool) -> pb.ActivateReply:
            self.running.add(request.move)
            return pb.ActivateReply(running=True)

        async def discard(request: pb.TokenRequest, timeout_s: float) -> pb.DiscardReply:
            return pb.DiscardReply()

        async def copy(request: pb.MoveRequest, timeout_s: float) -> pb.Copy:
            return pb.Copy(state=pb.Copy.DISCARDED)

        yield SimpleNamespace(
            source=SimpleNamespace(GetImage=image, Send=send),
            target=SimpleNamespace(
                Examine=examine, Prepare=prepare, Restore=restore, Activate=activate, Discard=discard, GetCopy=copy
            ),
            job=SimpleNamespace(Begin=begin, Commit=commit, Abort=abort),
        )

    async def back(self, known: tuple[UnreadableImage, ...] = (), record: pb.JobRecord = RECORD) -> JobResult:
        cluster: Any = self
        return await bring_back(cluster, JobOptions("night"), "node-1", record, lambda event: None, known)

    @property
    def used(self) -> list[str]:
        return sorted(self.image_of[move] for move in self.running)


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def infos(cluster: Any) -> dict[str, pb.NodeInfo]:
        return {node: pb.NodeInfo(name=node) for node in cluster.nodes}

    async def addresses(cluster: Any, infos: Any) -> list[pb.NodeAddresses]:
        return []

    async def kept_on(cluster: Any, nodes: Any) -> tuple[dict[str, set[str]], dict[str, SnapshotError]]:
        return {}, {}

    module = sys.modules["migrator.jobs.resume"]
    monkeypatch.setattr(module, "node_infos", infos)
    monkeypatch.setattr(module, "node_addresses", addresses)
    monkeypatch.setattr(module.homes, "kept_on", kept_on)


async def test_image_of_the_own_node_is_used_if_it_can_be_read() -> None:
    cluster = Cluster()
    result = await cluster.back()
    assert (result.outcome, cluster.used, len(cluster.records)) == (JobVerdict.RESUMED, ["own-0", "own-1"], 1)
    assert result.unreadable_images == []


@pytest.mark.parametrize("call", ["read", "send", "restore"])
async def test_next_copy_is_used_and_the_unreadable_image_is_named(call: str) -> None:
    cluster = Cluster(own_0=call)
    result = await cluster.back()
    assert (result.outcome, cluster.used) == (JobVerdict.RESUMED, ["copy-0", "own-1"])
    assert len(set(cluster.records)) == len(cluster.records) == (1 if call == "read" else 2)
    (bad,) = result.unreadable_images
    assert (bad.rank, bad.node, bad.image) == (0, "node-1", "own-0")
    assert bad.text.startswith("rank 0: the image on node-1 cannot be used: ")
    assert "Input/output error" in bad.text
    assert result.to_json()["unreadable_images"] == [
        {"rank": 0, "node": "node-1", "image": "own-0", "reason": bad.reason}
    ]
    assert {place.rank: place.came_from for place in result.ranks} == {0: "node-2", 1: "node-2"}


async def test_all_unreadable_images_are_found_in_one_attempt() -> None:
    """Another attempt for each rank would send all the others in vain."""
    cluster = Cluster(own_0="send", own_1="send", copy_1="restore")
    result = await cluster.back()
    assert (result.outcome, cluster.used) == (JobVerdict.RESUMED, ["copy-0", "more-1"])
    assert [one.image for one in result.unreadable_images] == ["own-0", "copy-1", "own-1"]
    assert len(cluster.records) == 3
    assert Counter(cluster.asked)["send", "own-0"] == 1, "it is not tried again"


async def test_images_that_are_known_to_be_unreadable_are_not_asked_for() -> None:
    cluster = Cluster(own_0="send")
    known = UnreadableImage(0, "node-1", "own-0", "no")
    result = await cluster.back((known,))
    assert (len(cluster.records), cluster.used) == (1, ["copy-0", "own-1"])
    assert result.unreadable_images == [known]


async def test_rank_without_a_readable_image_is_an_error_with_all_that_was_tried() -> None:
    cluster = Cluster(own_1="send", copy_1="read", more_1="restore")
    with pytest.raises(Unreadable) as caught:
        await cluster.back()
    said = caught.value.message
    assert said.startswith("no image of rank 1 of job night can be read: ")
    for node in ("node-1: the image copy-1", "node-2: the image own-1", "node-3: the image more-1"):
        assert node in said
    assert "migrator job drop night" in caught.value.advice
    assert caught.value.where is Where.SUSPENDED
    assert cluster.running == set()
    cluster.bad.clear()
    assert (await cluster.back()).outcome is JobVerdict.RESUMED


async def test_copy_that_is_gone_is_named_beside_the_unreadable_image() -> None:
    cluster = Cluster(own_1="send")
    cluster.lost = {"copy-1", "more-1"}
    with pytest.raises(Unreadable, match="own-1 of rank 1: Input/output error; no image copy-1; no image more-1"):
        await cluster.back()


async def test_other_failures_do_not_use_another_copy() -> None:
    cluster = Cluster()
    cluster.lost = {"own-0"}  # between the two calls

    def read_only(call: str, image: str) -> None:
        if (call, image) == ("send", "own-0"):
            raise Unreachable("node-1 does not answer")

    cluster._fail = read_only  # type: ignore[method-assign]
    result = await cluster.back()
    assert (result.outcome, result.error_code, result.unreadable_images) == (JobVerdict.UNDONE, "unreachable", [])
    assert len(cluster.records) == 1


async def test_rollback_is_not_decided_if_no_image_of_a_rank_can_be_read() -> None:
    cluster: Any = Cluster(own_0="read", copy_1="read")
    bad: list[UnreadableImage] = []
    found = await _places(cluster, RECORD, list(cluster.nodes), bad, Where.UNTOUCHED)
    assert {rank: place.node for rank, place in found.items()} == {0: "node-2", 1: "node-2"}
    assert [one.image for one in bad] == ["own-0"]
    cluster.bad |= {"copy-0": "read"}
    bad.clear()
    with pytest.raises(Unreadable, match=r"of rank 0 of job night can be read: .*; node-3 does not answer") as caught:
        await _places(cluster, RECORD, ["node-1", "node-2"], bad, Where.UNTOUCHED)
    assert caught.value.where is Where.UNTOUCHED


def signed() -> pb.JobRecord:
    record = pb.JobRecord()
    record.CopyFrom(RECORD)
    record.snapshot = "m-00000000000a"
    for part in record.participants:
        part.made_on = part.node
    return record


async def test_targets_are_told_which_node_has_signed_and_for_which_snapshot() -> None:
    cluster = Cluster(own_0="send")
    result = await cluster.back(record=signed())
    assert result.warnings == []
    found = {(one.facts.rank.rank, one.image_node, one.made_on, one.snapshot) for one in cluster.prepared}
    assert found == {
        (0, "node-1", "node-1", "m-00000000000a"),
        (0, "node-2", "node-1", "m-00000000000a"),
        (1, "node-2", "node-2", "m-00000000000a"),
    }


async def test_node_that_names_another_maker_is_not_used() -> None:
    cluster = Cluster(own_0="send")
    cluster.made_on["copy-0"] = "node-2"
    result = await cluster.back(record=signed())
    assert cluster.used == ["more-0", "own-1"]
    assert ("copy-0", "node-2") in {(one.image, one.node) for one in result.unreadable_images}
    assert "it says that node-2 has made it, and node-1 has" in result.unreadable_images[1].reason


async def test_copy_of_a_maker_that_does_not_sign_is_used_with_a_warning() -> None:
    cluster = Cluster(own_0="send")
    result = await cluster.back()
    assert result.outcome is JobVerdict.RESUMED
    (warning,) = result.warnings
    assert "rank 0: node-1 has made the image with an older version, and has not signed the copy on node-2" in warning


def test_images_are_asked_for_on_nodes_that_answer_first() -> None:
    kept = [pb.ImageCopy(move=f"m-{node}", node=node) for node in "abc"]
    assert [one.node for one in places.in_order(kept, {"b", "c"}, ())] == ["b", "c", "a"]
    assert [one.node for one in places.in_order(kept, {"a", "b"}, {"m-a"})] == ["b", "c"]
