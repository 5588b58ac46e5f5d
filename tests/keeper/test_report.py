"""Tests that a worker's error file for torchrun is accessed as the rank's user, whatever its path refers to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shim.keeper import report
from shim.keeper.privileges import Identity

MINE = Identity({"user_id": os.getuid(), "group_id": os.getgid(), "groups": []})
NOBODY = Identity({"user_id": 65534, "group_id": 65534, "groups": []})


@pytest.mark.parametrize(
    ("given", "path"),
    [({}, ""), ({"TORCHELASTIC_ERROR_FILE": "/t/e.json"}, "/t/e.json"), ({"TORCHELASTIC_ERROR_FILE": "e.json"}, "")],
)
def test_report_path_is_absolute_or_empty(given: dict[str, str], path: str) -> None:
    assert report.path_in(given) == path


def test_report_is_collected_and_written_on_the_home_node(tmp_path: Path) -> None:
    there, here = tmp_path / "a" / "b" / "error.json", tmp_path / "home.json"
    report.make_room(str(there), MINE)
    assert report.collect(str(there), MINE) == b""
    there.write_bytes(b"{}" * report.MOST_BYTES)
    content = report.collect(str(there), MINE)
    assert content == b"{}" * (report.MOST_BYTES // 2)
    report.put(str(here), content)
    assert here.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "home.json"]


def test_only_a_regular_file_is_collected(tmp_path: Path) -> None:
    secret, link, pipe = tmp_path / "secret", tmp_path / "link", tmp_path / "pipe"
    secret.write_text("secret")
    link.symlink_to(secret)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "nothing"):
        assert report.collect(str(path), MINE) == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root could do more than the rank's user")
def test_paths_are_accessed_as_the_ranks_user(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "error.json").write_text("root's")
    report.make_room(str(private / "deeper" / "error.json"), NOBODY)
    assert not (private / "deeper").exists()
    assert report.collect(str(private / "error.json"), NOBODY) == b""
