"""Blocks are taken only from images of the same user's same job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from snapshotd.moves.jobs import replicas
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.transport.image.store import ImageStore

RECORD, BEFORE = "m-0000000000ff", "m-0000000000fe"
COPY = Begin(
    *("m-000000000001", "target", "job-1", "job", 1, "node-1", "e", "node-2", "e", "00" * 32, "boot", 1.0),
    user_id=7,
    coordinator=RECORD,
    coordinator_node="node-1",
    kind="copy",
)
OWN = msgspec.structs.replace(COPY, move="m-000000000002", role="source", rank_uid="job-2", rank=2, kind="snapshot")


class Daemon:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        self.journal = Journal(folder / "state")
        self.journal.begin(COPY)

    def has(self, begin: Begin, *, sealed: bool = True, journalled: bool = True) -> Path:
        if journalled:
            self.journal.begin(begin)
        image = self.folder / begin.move
        image.mkdir(parents=True)
        if sealed:
            (image / ".sealed").write_text("[]")
        return image

    def images_for(self, move: str = COPY.move) -> list[Path]:
        node: Any = SimpleNamespace(journal=self.journal, store=ImageStore(self.folder))
        return list(replicas.images_for(node, move)[1])


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_ranks_of_the_same_snapshot_and_earlier_copies_of_the_rank_are_used(daemon: Daemon) -> None:
    own = daemon.has(OWN)
    earlier = daemon.has(msgspec.structs.replace(COPY, move="m-000000000003", coordinator=BEFORE))
    assert daemon.images_for() == [own, earlier]


@pytest.mark.parametrize(
    "other",
    [
        {"user_id": 8},
        {"user_id": -1},
        {"job": "another"},
        {"coordinator": BEFORE},
        {"coordinator_node": "node-3"},
        {"kind": ""},
        {"kind": "copy", "role": "target"},
    ],
)
def test_other_images_are_not_used(daemon: Daemon, other: dict[str, Any]) -> None:
    daemon.has(msgspec.structs.replace(OWN, **other))
    assert daemon.images_for() == []


def test_images_that_are_not_whole_or_unknown_are_not_used(daemon: Daemon) -> None:
    daemon.has(OWN, sealed=False)
    daemon.has(msgspec.structs.replace(OWN, move="m-000000000004"), journalled=False)
    assert daemon.images_for() == []


def test_copy_of_a_user_who_was_not_journalled_uses_nothing(daemon: Daemon) -> None:
    nobody = msgspec.structs.replace(COPY, move="m-000000000005", user_id=-1)
    daemon.journal.begin(nobody)
    daemon.has(msgspec.structs.replace(OWN, user_id=-1))
    assert daemon.images_for(nobody.move) == []


def test_moves_that_keep_no_copy_use_nothing(daemon: Daemon) -> None:
    moved = msgspec.structs.replace(COPY, move="m-000000000006", kind="", coordinator="")
    daemon.journal.begin(moved)
    daemon.has(OWN)
    assert daemon.images_for(moved.move) == []
    assert daemon.images_for("m-00000000000f") == []
