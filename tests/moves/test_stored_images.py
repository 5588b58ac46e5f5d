"""The image of a suspended rank is described beside the journal, and one that has changed on the disk is not sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged
from snapshotd.moves.jobs import stored
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin

MOVE = "m-0123456789ab"


@pytest.fixture
def move_log(tmp_path: Path) -> MoveLog:
    names = ("train-0-01234567", "train", 0, "node-1", "10.0.0.1:7070", "node-1", "10.0.0.1:7070")
    begin = Begin(MOVE, "source", *names, "00" * 32, "boot", 1.0, coordinator="m-ba9876543210")
    return Journal(tmp_path / "state").begin(begin)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(b"pages" * 1000)
    (folder / "core.img").write_bytes(b"core")
    (folder / ".sealed").write_text("[]")
    return folder


def test_facts_and_files_are_read_again(move_log: MoveLog, images: Path) -> None:
    facts = pb.RankFacts(source_node="node-1", memory_bytes=5, rank=pb.Rank(uid="train-0-01234567"))
    stored.describe(images, move_log, facts)
    assert stored.facts_of(move_log) == facts
    assert stored.verified(images, move_log) == [images / "core.img", images / "pages-1.img"]


@pytest.mark.parametrize("damage", ["changed", "missing", "new"])
def test_damaged_image_is_refused_by_the_name_of_the_file(move_log: MoveLog, images: Path, damage: str) -> None:
    stored.describe(images, move_log, pb.RankFacts())
    match damage:
        case "changed":
            (images / "pages-1.img").write_bytes(b"pagez" * 1000)
        case "missing":
            (images / "pages-1.img").unlink()
        case _:
            (images / "pages-2.img").write_bytes(b"")
    with pytest.raises(Damaged, match=r"pages-[12]\.img"):
        stored.verified(images, move_log)


def test_missing_description_is_damaged(move_log: MoveLog, images: Path) -> None:
    with pytest.raises(Damaged):
        stored.facts_of(move_log)
    with pytest.raises(Damaged):
        stored.verified(images, move_log)
