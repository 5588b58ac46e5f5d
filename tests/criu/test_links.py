"""Names that criu left are removed where they were made, not where a user's link leads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.criu import links

USER_ID = 1500


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A user's directory, swapped for a link to root's, which has the names that criu makes."""
    job, root = tmp_path / "job", tmp_path / "root"
    root.mkdir()
    for name in ("data", "link_remap.1"):
        (root / name).write_text("of root")
    os.link(root / "data", root / "data.cr.1.ghost")
    job.symlink_to(root)
    os.chown(job, USER_ID, USER_ID, follow_symlinks=False)
    return job, root


def test_root_s_files_behind_a_user_s_link_stay(folders: tuple[Path, Path]) -> None:
    job, root = folders
    before = {path.name for path in root.iterdir()}
    links.sweep_ghosts([(f"{job}/data", f"{job}/data.cr.1.ghost")])
    found = (root / "link_remap.1").stat()
    links.sweep([(str(job), found.st_dev, found.st_ino)])
    assert {path.name for path in root.iterdir()} == before


def test_link_that_root_made_is_followed(folders: tuple[Path, Path]) -> None:
    job, root = folders
    os.chown(job, 0, 0, follow_symlinks=False)
    links.sweep_ghosts([(f"{job}/data", f"{job}/data.cr.1.ghost")])
    assert {path.name for path in root.iterdir()} == {"link_remap.1"}
