"""A rollback from another copy, if an image cannot be read: which nodes are asked, and what is said."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from migrator.job_protocol import JobVerdict
from migrator.job_results import UnreadableImage
from migrator.jobs import places
from migrator.jobs.rollback import _places
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreadable, Where
from tests.cli.kept_copies import RECORD, Cluster, use


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)


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
