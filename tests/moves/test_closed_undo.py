"""Closed files never replace what is not the rank's; an undo and a departure remove nothing else."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from snapshotd.api.errors import Refused
from snapshotd.files import closed
from snapshotd.moves.closed_files import ClosedFiles
from snapshotd.moves.closed_manifest import Manifest, Placed
from tests.moves.closed_nodes import OTHER_ID, USER, Place, looks, pack_into, send, write_manifest

# ---------------------------------------------------------------- what is in the way


def test_existing_files_are_never_overwritten(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/same")
    here.make("cache/other", "mine")
    here.make("was-a-file/file")
    there.make("cache/same")
    there.make("cache/other", "also")
    there.make("was-a-file")
    before = looks(there.local)
    _, placed = send(here, there)
    assert looks(there.local) == before
    assert placed.made == []


@pytest.mark.parametrize("name", ["cache", "file", "cache/file"])
def test_name_that_another_user_has_taken_refuses_the_move(nodes: tuple[Place, Place], name: str) -> None:
    """The rank would load code from that user's directory as from its own cache."""
    here, there = nodes
    for place in ("a", "cache/file", "file", "z"):
        here.make(place)
    if name == "cache/file":
        there.folder("cache", 0o777)
    (there.folder if name == "cache" else there.make)(name, owner=OTHER_ID)
    before = looks(there.local)
    with pytest.raises(Refused, match=f"closed-files: .*{name} belongs to user {OTHER_ID}"):
        send(here, there)
    assert set(looks(there.local)) == set(before)


def test_link_on_the_target_leads_nowhere(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/file")
    elsewhere = there.local.parent / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, USER.user_id, USER.group_id)
    os.symlink(elsewhere, there.local / "cache")
    os.lchown(there.local / "cache", USER.user_id, USER.group_id)
    _, placed = send(here, there)
    assert placed.made == []
    assert list(elsewhere.iterdir()) == []


def test_full_disk_refuses_and_leaves_nothing(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    for number in range(20):
        here.make(f"cache/{number}", "x" * 20_000)
    command = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=1777", "closed-files-test", str(there.local)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        there.make("mine")
        with pytest.raises(Refused, match=r"closed-files: .*No space left"):
            send(here, there)
        assert [path.name for path in there.local.iterdir()] == ["mine"]
    finally:
        subprocess.run(["umount", str(there.local)], check=True)


# ---------------------------------------------------------------- undo, leaving, coming back


def test_undo_removes_what_was_made_and_nothing_else(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/a/one")
    here.make("cache/a/two")
    here.make("locked/file")
    (here.local / "locked").chmod(0o500)
    there.make("cache/b/of-another-job")
    _, placed = send(here, there)
    (there.local / "cache/a/two").unlink()
    there.make("cache/a/two", "made since")
    there.closed.take_away(placed, USER)
    assert set(looks(there.local)) == {"cache", "cache/b", "cache/b/of-another-job", "cache/a", "cache/a/two"}
    assert (there.local / "cache/a/two").read_text() == "made since"


def test_undo_leaves_a_new_file_that_has_the_inode_of_the_one_that_was_made(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/one")
    _, placed = send(here, there)
    (there.local / "cache/one").unlink()
    there.make("cache/one", "made since")
    inode = (there.local / "cache/one").stat().st_ino  # often the same, and always in this test
    placed.made = [(root, path, device, inode, time) for root, path, device, _, time in placed.made]
    there.closed.take_away(placed, USER)
    assert (there.local / "cache/one").read_text() == "made since"


def test_child_whose_daemon_is_killed_removes_what_it_made(nodes: tuple[Place, Place]) -> None:
    """The daemon is killed after the child has made the files, and before its journal has them."""
    here, there = nodes
    here.make("cache/a/one")

    class Killed(BaseException):
        pass

    def journal(placed: Placed) -> None:
        assert (there.local / "cache/a/one").exists()
        raise Killed

    found = here.find()
    pack_into(here, found, [row for row in found.rows if row.kind == "f"], there.images / "late")
    rows = [row._replace(pack=0) if row.kind == "f" else row for row in found.rows]
    write_manifest(there, Manifest(found.roots, ["late"], rows))
    with pytest.raises(Killed):
        there.closed.place(there.images, USER, journal)
    assert list(there.local.iterdir()) == []


def test_files_stay_unless_they_are_the_ranks_alone(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    for name in ("cache/own", "cache/changed", "cache/others"):
        here.make(name)
    found = here.find()
    rows = [(*found.key(row), row.seen) for row in found.rows]
    (here.local / "cache/changed").write_text("again")
    here.closed.leave(rows, USER, lambda key, seen: key[1] != "cache/others")
    assert set(looks(here.local)) == {"cache", "cache/changed", "cache/others"}


def test_empty_directories_go_with_the_last_file(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    here.make("cache/a/b/own")
    found = here.find()
    here.closed.leave([(*found.key(row), row.seen) for row in found.rows], USER, lambda key, seen: True)
    assert list(here.local.iterdir()) == []


def test_rank_that_comes_back_replaces_what_it_left_unless_that_was_changed(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    for name in ("cache/a", "cache/b", "cache/c"):
        here.make(name, "old")
    found, _ = send(here, there)
    here.closed.leave([(*found.key(row), row.seen) for row in found.rows], USER, lambda key, seen: False)
    (there.local / "cache/a").write_text("new a")
    (there.local / "cache/b").write_text("new b")
    (here.local / "cache/b").write_text("of another job")
    send(there, here)
    assert {path.name: path.read_text() for path in (here.local / "cache").iterdir()} == {
        "a": "new a",
        "b": "of another job",
        "c": "old",
    }


def test_directory_that_was_left_gets_its_present_mode_and_time(nodes: tuple[Place, Place]) -> None:
    here, there = nodes
    here.make("cache/a/file")
    (here.local / "cache/a").chmod(0o500)
    found, _ = send(here, there)
    here.closed.leave([(*found.key(row), row.seen) for row in found.rows], USER, lambda key, seen: False)
    (there.local / "cache/a").chmod(0o750)
    there.make("cache/a/more")
    os.utime(there.local / "cache/a", ns=(10**18, 10**18))
    send(there, here)
    assert looks(here.local) == looks(there.local)


def test_rank_replaces_what_it_had_open_when_it_left(nodes: tuple[Place, Place]) -> None:
    """And has closed since, on the other node."""
    here, there = nodes
    path = here.make("log", "old")
    seen = path.stat()
    here.closed.left_open = lambda: {"/carry/log": [seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size, 1500]}
    there.make("log", "old and new")
    send(there, here)
    assert path.read_text() == "old and new"


def test_file_that_was_open_the_last_time_is_not_known_as_a_closed_one(nodes: tuple[Place, Place]) -> None:
    here, _ = nodes
    seen = here.make("file").stat()
    found = here.find()
    rows = [(*found.key(row), row.seen) for row in found.rows]
    here.closed.leave(rows, USER, lambda key, seen: False)
    restarted = ClosedFiles(here.closed.state_dir, here.closed.roots)
    for one in (here.closed, restarted):
        assert one.left("/carry/file") == [seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size]
    here.closed.leave([], USER, lambda key, seen: False, ["/carry/file"])
    assert here.closed.left("/carry/file") is None


def test_older_files_are_left_out_if_there_are_too_many(
    nodes: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = nodes
    for number in range(10):
        here.make(f"data/old-{number}")
    time.sleep(0.1)
    since_ns = time.time_ns()
    time.sleep(0.1)
    for number in range(3):
        here.make(f"data/new-{number}")
    request = {
        "roots": [str(here.local)],
        "since_ns": since_ns,
        "in_use": [[]],
        "exclude": [],
        "held_elsewhere": [],
        "mounts": [[]],
    }
    for most, complete in ((8, True), (4, True), (3, False)):
        monkeypatch.setattr(closed, "MAX_ENTRIES", most)
        result = closed.scan(request, USER.user_id)
        assert result["complete"] is complete
        assert result["older_left"] == 10 or not complete
        assert {row.path for row in result["rows"]} <= {"data", *(f"data/new-{number}" for number in range(3))}
        assert len(result["rows"]) == min(4, most)
