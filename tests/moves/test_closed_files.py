"""Files that a rank made and has closed: which count as the rank's, and what arrives of them."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import Damaged
from snapshotd.files import closed
from snapshotd.moves import closed_files
from snapshotd.moves.closed_manifest import Manifest
from snapshotd.proc import mountinfo
from tests.moves.closed_nodes import OTHER_ID, USER, Place, looks, names, pack_into, send, write_manifest

# ---------------------------------------------------------------- which files


def test_files_of_the_user_that_changed_since_the_rank_started_are_found(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("old")
    here.make("old-folder/file")
    time.sleep(0.1)
    start = time.time() + closed_files.EARLY_S
    time.sleep(0.1)
    here.make("new")
    here.make("of-another", owner=OTHER_ID)
    here.make("their-folder/file", owner=OTHER_ID)
    here.folder("empty")
    assert names(here.find(start)) == {"new", "empty"}


def test_cache_of_an_earlier_run_is_found_with_what_was_added_to_it_or_is_in_use(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("cache/a/old")
    here.make("used/a/old")
    here.make("unused/a/old")
    time.sleep(0.1)
    start = time.time() + closed_files.EARLY_S
    time.sleep(0.1)
    here.make("cache/b/new")
    found = here.find(start, ["/carry/used/a/old", "/elsewhere/unused"])
    assert names(found) == {"cache", "cache/a", "cache/a/old", "cache/b", "cache/b/new", "used", "used/a", "used/a/old"}
    assert {row.path for row in found.rows if row.changed} == {"cache", "cache/b", "cache/b/new"}
    kept = found.within(found.all_bytes - 1)
    assert {row.path for row in kept.rows if row.kind == "f"} == {"cache/b/new"}


def test_directories_of_root_are_searched_and_not_taken(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.folder("shared", 0o1777, owner=0)
    here.make("shared/mine")
    here.make("shared/systemd-private-x/tmp")
    assert names(here.find()) == {"shared/mine"}
    _, placed = send(here, there)
    assert placed.made == []  # the other node has no such directory, and the user may not make root's
    there.folder("shared", 0o1777, owner=0)
    send(here, there)
    assert (there.local / "shared/mine").read_text() == "content"


def test_directories_of_the_daemon_and_special_files_are_left_out(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("daemon/journal")
    os.mkfifo(here.local / "fifo")
    os.chown(here.local / "fifo", USER.user_id, USER.group_id)
    here.make("file")
    assert names(here.find(exclude=[here.local / "daemon", Path("/no/such")])) == {"file"}


def test_file_that_moves_because_it_is_open_is_not_sent_twice(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("folder/open")
    here.make("folder/closed")
    assert names(here.find().without(["/carry/folder/open", "/carry/folder"])) == {"folder", "folder/closed"}


def test_mount_points_are_not_looked_at(tmp_path: Path) -> None:
    """A file system's server may be silent, and would be asked by stat(2) already."""
    for name in ("cache/a", "cache/mount", "mount", "b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted: dict[str, Any] = {"roots": [str(tmp_path)], "since_ns": 0, "in_use": [[]], "exclude": []}
    wanted |= {"held_elsewhere": [], "mounts": [["cache/mount", "mount"]]}
    assert {row.path for row in closed.scan(wanted, os.geteuid())["rows"]} == {"cache", "cache/a", "b"}
    points = [str(mount.point) for mount in mountinfo.read()]
    assert {f"/dev/{below}" for below in closed_files._mounts_below("/dev")} == {
        point for point in points if point.startswith("/dev/")
    }


def test_more_files_than_can_be_looked_at_end_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed, "MAX_ENTRIES", 10)
    for number in range(30):
        (tmp_path / str(number)).touch()
    wanted: dict[str, Any] = {"roots": [str(tmp_path)], "since_ns": 0, "in_use": [[]], "exclude": []}
    look = closed.scan(wanted | {"held_elsewhere": [], "mounts": [[]]}, os.geteuid())
    assert (len(look["rows"]), look["complete"]) == (10, False)


# ---------------------------------------------------------------- what arrives


def test_modes_owners_times_links_and_empty_directories_arrive_exactly(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/a/file", "x" * 5000, 0o754)
    os.utime(here.local / "cache/a/file", ns=(10**18 + 1, 10**18 + 2))
    here.make("cache/a/empty", "")
    os.chown(here.local / "cache/a/empty", USER.user_id, 1502)
    here.make("cache/no/read-only", mode=0o400)
    os.symlink("../a/file", here.local / "cache/no/link")
    os.lchown(here.local / "cache/no/link", USER.user_id, USER.group_id)
    here.folder("cache/nothing", 0o700)
    (here.local / "cache/no").chmod(0o500)
    os.utime(here.local / "cache", ns=(10**18 + 3, 10**18 + 4))
    _, placed = send(here, there)
    assert looks(there.local) == looks(here.local)
    assert len(placed.made) == len(looks(here.local))
    assert not (there.images / "late").exists()


def test_directory_that_the_move_made_for_an_open_file_gets_its_mode_and_times(nodes: tuple[Place, Place]) -> None:
    """Files are made in it, which needs rights and changes its times."""
    here, there = nodes
    here.make("cache/closed")
    (here.local / "cache").chmod(0o500)
    os.utime(here.local / "cache", ns=(10**18 + 3, 10**18 + 4))
    made = there.folder("cache", 0o500)
    found = made.stat()
    send(here, there, made=[("/carry/cache", found.st_dev, found.st_ino)])
    assert looks(there.local) == looks(here.local)


def test_set_user_id_bits_and_foreign_groups_are_not_made(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    path = here.make("tool")
    os.chown(path, USER.user_id, 4)
    path.chmod(0o6755)
    send(here, there)
    made = (there.local / "tool").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_gid) == (0o755, USER.user_id, USER.group_id)


def test_holes_stay_holes(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    path = here.make("sparse")
    with path.open("r+b") as file:
        file.seek(40 << 20)
        file.write(b"end")
    found = here.find()
    # as the image store writes them: zero pages are left out
    with (there.images / "late").open("wb") as file:
        file.write(b"content")
        file.seek(40 << 20)
        file.write(b"end")
    rows = [row._replace(pack=0, offset=0) for row in found.rows]
    write_manifest(there, Manifest(found.roots, ["late"], rows))
    there.receive(found)
    assert (there.local / "sparse").read_bytes() == path.read_bytes()
    assert (there.local / "sparse").stat().st_blocks * 512 < 1 << 20


def test_file_that_changes_or_goes_while_it_is_packed_is_reported(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    for name in ("grows", "goes", "link", "stays"):
        here.make(f"cache/{name}")
    cache, secret = here.local / "cache", here.make("secret", "of another", owner=OTHER_ID, mode=0o644)
    found = here.find()
    (cache / "grows").write_text("longer than before")
    (cache / "goes").unlink()
    (cache / "link").unlink()
    (cache / "link").symlink_to(secret)
    files = [row for row in found.rows if row.kind == "f"]
    bad = pack_into(here, found, files, there.images / "late")
    assert {path for _, path in bad} == {"cache/grows", "cache/goes", "cache/link"}
    content = (there.images / "late").read_bytes()
    assert len(content) == 4 * len("content")
    at = len("content") * [row.path for row in files].index("cache/stays")
    assert content[at : at + 7] == b"content"
    assert b"of another" not in content


def test_reader_that_goes_away_ends_the_packing(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("large", "x" * (1 << 20))
    found = here.find()
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        here.closed.pack(found, found.rows, USER, writing)
    os.close(writing)


# ---------------------------------------------------------------- forged lists


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../escape"},
        {"path": "/etc/cron.d/x"},
        {"path": "a/../../b"},
        {"path": ""},
        {"kind": "x"},
        {"pack": 1},
        {"offset": 5},
        {"offset": -1},
        {"seen": [1, 2, 1 << 40, 0, 0]},
        {"seen": [1]},
        {"mode": "root"},
        {"mtime_ns": 1 << 64},
        {"kind": "l", "link": "a\0b"},
        {"root": -1},
    ],
)
def test_forged_manifest_is_refused(nodes: tuple[Place, Place], change: dict[str, Any]) -> None:
    here, there = nodes
    here.make("file")
    found = here.find()
    pack_into(here, found, found.rows, there.images / "late")
    row = found.rows[0]._replace(pack=0, offset=0)._replace(**change)
    write_manifest(there, Manifest(found.roots, ["late"], [row]))
    with pytest.raises(Damaged):
        there.receive(found)
    assert list(there.local.iterdir()) == []


def test_forged_manifest_cannot_fill_the_disk_with_one_content(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("file")
    found = here.find()
    pack_into(here, found, found.rows, there.images / "late")
    rows = [found.rows[0]._replace(pack=0, offset=0, path=f"file-{number}") for number in range(2)]
    write_manifest(there, Manifest(found.roots, ["late"], rows))
    with pytest.raises(Damaged):
        there.receive(found)
    assert list(there.local.iterdir()) == []


@pytest.mark.parametrize("pack", ["../../secret", "/etc/passwd", "closed.json", "missing", "late/../late", "ahead-1"])
def test_pack_of_a_forged_manifest_is_not_opened(nodes: tuple[Place, Place], pack: str) -> None:
    here, there = nodes
    here.make("file")
    found = here.find()
    pack_into(here, found, found.rows, there.images / "late")
    (there.images.parent / "secret").write_text("content")
    write_manifest(there, Manifest(found.roots, [pack], [found.rows[0]._replace(pack=0, offset=0)]))
    with pytest.raises(Damaged):
        there.receive(found)
    assert list(there.local.iterdir()) == []
    assert (there.images.parent / "secret").exists()


def test_unusual_names_arrive(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    for name in (b"not utf-8 \xff\xfe", b"..two dots", b"new\nline", b"-", b" ", "ß€".encode()):
        here.make(os.fsdecode(b"cache/" + name), "x")
    send(here, there)
    assert looks(there.local) == looks(here.local)
    assert len(looks(there.local)) == 7


def test_set_user_id_bits_of_a_forged_manifest_are_not_made(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("file")
    found = here.find()
    pack_into(here, found, found.rows, there.images / "late")
    row = found.rows[0]._replace(pack=0, offset=0, mode=0o6755, group=0)
    write_manifest(there, Manifest(found.roots, ["late"], [row]))
    there.receive(found)
    made = (there.local / "file").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_gid) == (0o755, USER.user_id, USER.group_id)


def test_what_was_brought_and_was_there_already_is_recorded_by_its_top(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    for place in nodes:
        place.make("cache/a/file")
        place.folder("shared", 0o1777, owner=0)
    here.make("shared/mine/file")
    _, placed = send(here, there)
    assert placed.tops == ["/carry/cache", "/carry/shared/mine"]
    assert {path for _, path, *_ in placed.made} == {"shared/mine", "shared/mine/file"}
