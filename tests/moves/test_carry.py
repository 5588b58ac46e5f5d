"""Carried files: a foreign file is never overwritten, and an undo removes what was placed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Refused
from snapshotd.moves.carry import Carry


@pytest.fixture
def place(tmp_path: Path) -> tuple[Carry, Path, Path]:
    local, images = tmp_path / "local", tmp_path / "images"
    local.mkdir()
    images.mkdir()
    return Carry(tmp_path, [str(local)]), local, images


def fact(path: Path, mode: int = stat.S_IFREG | 0o640) -> pb.FileFact:
    return pb.FileFact(path=str(path), mode=mode, mtime_ns=10**18)


def test_files_directories_and_fifos_are_placed_and_removed(place: tuple[Carry, Path, Path]) -> None:
    carry, local, images = place
    (images / "carry-1").write_text("content")
    placed: list[str] = []
    facts = [
        fact(local / "d", stat.S_IFDIR | 0o700),
        fact(local / "d" / "file"),
        fact(local / "d" / "fifo", stat.S_IFIFO | 0o600),
    ]
    carry.place(images, facts, placed)
    found = (local / "d" / "file").stat()
    assert (local / "d" / "file").read_text() == "content"
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert found.st_mtime_ns == 10**18
    assert stat.S_ISFIFO((local / "d" / "fifo").stat().st_mode)
    carry.take_away(placed)
    assert not (local / "d").exists()


def test_file_with_other_content_is_not_overwritten(place: tuple[Carry, Path, Path]) -> None:
    carry, local, images = place
    (local / "file").write_text("mine")
    (images / "carry-0").write_text("another")
    with pytest.raises(Refused, match=r"carried-files: .* other content"):
        carry.place(images, [fact(local / "file")], [])
    assert (local / "file").read_text() == "mine"


def test_file_with_the_same_content_is_accepted(place: tuple[Carry, Path, Path]) -> None:
    carry, local, images = place
    (local / "file").write_text("same")
    (images / "carry-0").write_text("same")
    placed: list[str] = []
    carry.place(images, [fact(local / "file")], placed)
    assert placed == []


def test_file_that_a_rank_left_may_be_replaced_until_it_is_changed(place: tuple[Carry, Path, Path]) -> None:
    carry, local, images = place
    left = local / "file"
    left.write_text("old")
    carry.remember([str(left)])
    assert carry.may_replace(str(left))
    (images / "carry-0").write_text("new")
    carry.place(images, [fact(left)], [])
    assert left.read_text() == "new"
    carry.remember([str(left)])
    os.utime(left, ns=(1, 1))
    assert not carry.may_replace(str(left))


@pytest.mark.parametrize("path", ["/etc/passwd", "{local}/../x", "{local}/link/x", "relative"])
def test_path_outside_the_carry_paths_is_rejected(place: tuple[Carry, Path, Path], path: str) -> None:
    carry, local, images = place
    (local / "link").symlink_to("/etc")
    (images / "carry-0").write_text("x")
    with pytest.raises(Damaged):
        carry.place(images, [fact(Path(path.format(local=local)))], [])
