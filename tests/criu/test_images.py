"""Changes criu's images between dump and restore, and removes the links that a killed criu leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pycriu import images

from snapshotd.api.errors import Damaged
from snapshotd.criu import links
from snapshotd.criu.images import ghosts as unlinked_in
from snapshotd.criu.images import mend


def reg(number: int, name: str) -> dict[str, Any]:
    fown = {"uid": 0, "euid": 0, "signum": 0, "pid_type": 0, "pid": 0}
    return {"type": "REG", "id": number, "reg": {"id": number, "flags": 0, "pos": 0, "fown": fown, "name": name}}


def remap(number: int, target: int, kind: str) -> dict[str, Any]:
    return {"orig_id": number, "remap_id": target, "remap_type": kind}


def store(folder: Path, files: list[dict[str, Any]], remaps: list[dict[str, Any]]) -> None:
    for name, magic, entries in (("files", "FILES", files), ("remap-fpath", "REMAP_FPATH", remaps)):
        with (folder / f"{name}.img").open("wb") as file:
            images.dump({"magic": magic, "entries": entries}, file)


def load(folder: Path, name: str) -> list[dict[str, Any]]:
    with (folder / name).open("rb") as file:
        entries: list[dict[str, Any]] = images.load(file)["entries"]
        return entries


SEMAPHORE, LINK, GHOST, PLAIN = "/dev/shm/sem.5OS9FP", "/dev/shm/link_remap.7", "/dev/shm/torch_1", "/dev/shm/sem.x"


def test_file_with_a_link_of_criu_gets_the_name_under_which_it_moves(tmp_path: Path) -> None:
    """The same name without a link is another file. Unlinked files do not change."""
    store(
        tmp_path,
        [reg(1, SEMAPHORE), reg(7, LINK), reg(2, GHOST), reg(3, PLAIN), reg(4, SEMAPHORE)],
        [remap(1, 7, "LINKED"), remap(2, 1, "GHOST")],
    )
    mend(tmp_path, {SEMAPHORE: "/dev/shm/sem.mp-1"})
    files = [(entry["id"], entry["reg"]["name"]) for entry in load(tmp_path, "files.img")]
    assert files == [(1, "/dev/shm/sem.mp-1"), (2, GHOST), (3, PLAIN), (4, SEMAPHORE)]
    assert load(tmp_path, "remap-fpath.img") == [remap(2, 1, "GHOST")]


def test_remaps_without_links_do_not_change(tmp_path: Path) -> None:
    store(tmp_path, [reg(2, GHOST)], [remap(2, 1, "GHOST")])
    before = (tmp_path / "remap-fpath.img").read_bytes()
    mend(tmp_path, {})
    assert (tmp_path / "remap-fpath.img").read_bytes() == before
    (tmp_path / "remap-fpath.img").unlink()  # criu writes no file without entries
    mend(tmp_path, {})
    assert not (tmp_path / "remap-fpath.img").exists()


def test_link_of_criu_without_a_known_name_is_damage(tmp_path: Path) -> None:
    store(tmp_path, [reg(1, SEMAPHORE), reg(7, LINK)], [remap(1, 7, "LINKED")])
    with pytest.raises(Damaged, match=SEMAPHORE):
        mend(tmp_path, {"/dev/shm/sem.other": "/dev/shm/sem.mp-1"})


def test_unlinked_files_are_listed_with_criu_s_names(tmp_path: Path) -> None:
    store(tmp_path, [reg(2, GHOST), reg(3, PLAIN)], [remap(2, 0x1A, "GHOST")])
    assert unlinked_in(tmp_path) == [(GHOST, f"{GHOST}.cr.1a.ghost")]
    (tmp_path / "remap-fpath.img").unlink()
    assert unlinked_in(tmp_path) == []


def test_files_of_a_killed_restore_are_removed(tmp_path: Path) -> None:
    """Also under the real name, if a file was just being opened, but not another process's file of that name."""
    pairs = [(str(tmp_path / name), str(tmp_path / f"{name}.cr.{number}.ghost")) for number, name in enumerate("abc")]
    Path(pairs[2][1]).touch()
    noted = links.free(pairs)
    assert noted == pairs[:2]
    for name in ("a.cr.0.ghost", "b.cr.1.ghost", "b"):
        (tmp_path / name).touch()
    os.link(tmp_path / "a.cr.0.ghost", tmp_path / "a")
    os.link(tmp_path / "b.cr.1.ghost", tmp_path / "b.cr_link")
    links.sweep_ghosts(noted)
    assert {path.name for path in tmp_path.iterdir()} == {"b", "c.cr.2.ghost"}
    links.sweep_ghosts(noted)


def test_only_criu_s_links_to_the_rank_s_files_are_removed(tmp_path: Path) -> None:
    mine, other = tmp_path / "sem.mp-1", tmp_path / "sem.mp-2"
    for file in (mine, other):
        file.touch()
    noted = [(str(tmp_path), mine.stat().st_dev, mine.stat().st_ino)] * 2
    os.link(mine, tmp_path / "link_remap.12")
    os.link(mine, tmp_path / "link_remap.kept")
    os.link(other, tmp_path / "link_remap.13")
    mine.unlink()  # the rank continued and removed it
    links.sweep(noted)
    assert {path.name for path in tmp_path.iterdir()} == {"sem.mp-2", "link_remap.kept", "link_remap.13"}
    links.sweep([(str(tmp_path / "gone"), 1, 2)])
