"""What a rank leaves behind when it moves away: removed if it is the rank's alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Timeout
from snapshotd.moves import closed_manifest
from snapshotd.moves.closed_manifest import Placed
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files as sending
from snapshotd.moves.target import restore
from snapshotd.proc import maps, privileges, tree, users
from tests.moves.closed_move import EARLIER, USER, Move


def placed_by_an_earlier_move(move: Move, *names: str) -> None:
    earlier = move.begin(EARLIER, "target")
    files = [(0, f"cache/{name}", *identity(move.cache / name)) for name in names]
    closed_manifest.save(earlier.folder / closed_manifest.FILE, Placed([str(move.local)], files))
    earlier.mark(Mark.ACTIVATED)


def identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


async def test_what_a_move_made_for_the_rank_goes_with_it(move: Move) -> None:
    for name in ("brought", "changed", "made-here"):
        move.write(name, name)
    placed_by_an_earlier_move(move, "brought", "changed")
    await move.rest(None)
    move.write("changed", "by another job")
    sending.leave(move.node, move.log)
    assert sorted(path.name for path in move.cache.iterdir()) == ["changed", "made-here"]
    assert not (move.log.folder / closed_manifest.FILE).exists()
    sending.leave(move.node, move.log)  # repeated after a crash


async def test_what_was_added_to_a_directory_that_a_move_made_goes_with_it(move: Move) -> None:
    move.write("added", "content")
    (move.local / "alone").write_text("of another job, perhaps")
    os.chown(move.local / "alone", USER.user_id, USER.group_id)
    earlier = move.begin(EARLIER, "target")
    made = [(0, "cache", *identity(move.cache))]
    closed_manifest.save(earlier.folder / closed_manifest.FILE, Placed([str(move.local)], made))
    earlier.mark(Mark.ACTIVATED)
    await move.rest(None)
    sending.leave(move.node, move.log)
    assert [path.name for path in move.local.iterdir()] == ["alone"]


async def test_nothing_is_removed_while_the_user_has_another_process(move: Move) -> None:
    """It may be another rank that uses the same cache."""
    move.write("brought", "content")
    placed_by_an_earlier_move(move, "brought")
    await move.rest(None)
    with process_of(USER.user_id):
        sending.leave(move.node, move.log)
    assert (move.cache / "brought").exists()


def test_undone_move_leaves_files_that_another_rank_may_have_found(move: Move) -> None:
    """Two ranks of a user share a cache: what one move made, the other did not make again."""
    undone = move.begin(EARLIER, "target")
    node: Any = SimpleNamespace(journal=move.journal, ranks=SimpleNamespace(all=list))
    assert not restore._shares_files(node, undone.begin)
    for away, shares in (("spare-1", False), ("", True)):
        rank = SimpleNamespace(user_id=undone.begin.user_id, uid="job-1", away_node=away)
        node.ranks = SimpleNamespace(all=lambda rank=rank: [rank])
        assert restore._shares_files(node, undone.begin) is shares
    node.ranks = SimpleNamespace(all=list)
    arriving = move.begin("m-00000000000a", "target")
    for mark, shares in ((Mark.PREPARED, False), (Mark.RESTORING, True), (Mark.HELD, True), (Mark.DISCARDED, False)):
        arriving.mark(mark)
        assert restore._shares_files(node, undone.begin) is shares


@contextmanager
def process_of(user_id: int) -> Iterator[int]:
    """A process with this id among others, by its pid. It is a child of a child, which does not wait for its end."""
    code = f"""
import os, time
if os.fork() == 0:
    os.setresuid(0, 0, {user_id})
    print(os.getpid(), flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        starter.kill()
        starter.wait()
        starter.stdout.close()


def test_processes_of_a_user_are_seen() -> None:
    if os.geteuid() != 0:
        pytest.skip("processes of another user are started by root")
    assert not users.has_processes(USER.user_id)
    with process_of(USER.user_id) as pid:
        assert users.has_processes(USER.user_id)
        os.kill(pid, signal.SIGKILL)
        while tree.state(pid) != "Z":
            time.sleep(0.01)
        assert not users.has_processes(USER.user_id)  # a zombie


def test_child_of_the_daemon_that_waits_with_the_rights_of_a_user_does_not_count() -> None:
    """Such a child has read the memory of the rank, and stays for the next request."""
    if os.geteuid() != 0:
        pytest.skip("processes of another user are started by root")
    other = subprocess.Popen(["cat"], user=USER.user_id, group=USER.group_id, stdin=subprocess.PIPE)
    assert other.stdin is not None
    try:
        assert maps.read_raw(other.pid)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
    assert [name for name in os.listdir("/proc") if name.isdigit() and is_of_user(name)]
    assert not users.has_processes(USER.user_id)


def is_of_user(pid: str) -> bool:
    try:
        return USER.user_id in privileges.read(int(pid)).user_ids
    except OSError:
        return False


def test_look_at_what_other_processes_of_a_user_have_open_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user decides how many processes there are, and how many files each has open."""
    place = os.stat("/dev/shm").st_dev
    assert users.held_files(os.getuid(), {place}, ()) is not None
    monkeypatch.setattr(users, "_ALL_S", -1.0)
    with pytest.raises(Timeout, match="have too many files open"):
        users.held_files(os.getuid(), {place}, ())
