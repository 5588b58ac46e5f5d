"""A daemon that is restarted in the middle of a rollback knows which files restored ranks have open, and continues what a
killed attempt has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Refused
from snapshotd.moves.changed_file import Policy
from snapshotd.moves.journal import Journal
from snapshotd.moves.kept_files import KeptFiles, name_in_image
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import changed_files
from snapshotd.moves.target.changed_files import Settled
from snapshotd.moves.tree_facts import TreeFacts
from tests.moves.test_changed_files import RECORD, USER, cut, facts, folder, image, written  # noqa: F401 - fixtures

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="needs root: it becomes another user")]

BEFORE = "m-0000000000aa"  # a rollback before this one


class Daemon:
    """What a daemon has of files that are put back. A new one has only the journal."""

    def __init__(self, state: Path) -> None:
        self.journal = Journal(state)
        self.kept_files = KeptFiles(state / "files.sock")
        self.config = SimpleNamespace(node="node-1", carry_paths=())

    def put_back(self, rank: int, stored: Path, described: TreeFacts, policy: Policy = Policy.RESTORE) -> Settled:
        """For a rank whose image is sealed, or whose restore has failed."""
        move = f"m-{rank:012x}"
        nodes = ("node-1", "10.0.0.1:7070") * 2
        begin = Begin(move, "target", f"train-{rank}-{rank:08x}", "train", rank, *nodes, "5a" * 32, "boot", 1.0)
        move_log = self.journal.find(move) or self.journal.begin(begin)
        move_log.mark(Mark.RESTORING, ended_before=f"{BEFORE} {RECORD}", file_policy=policy, from_node="node-1")
        about: Any = SimpleNamespace(carried=[], kept="", identity=None, user_id=USER.user_id)
        node: Any = self
        return changed_files.put_back(node, move_log, stored, about, described)

    def mark(self, rank: int, mark: Mark) -> None:
        self.journal.get(f"m-{rank:012x}").mark(mark)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture(autouse=True)
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_files, "file_user", lambda identity, user_id: USER)


@pytest.mark.parametrize("first_is_longer", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_file_that_a_held_rank_has_open_is_not_taken_away_after_a_restart(
    folder: Path,  # noqa: F811
    image: Path,  # noqa: F811
    state: Path,
    first_is_longer: bool,
    deleted: bool,
) -> None:
    """Two ranks of a node had a log open that was longer in the image of one."""
    file = written(folder, "shared.log", "ab")
    first = facts(file)
    with file.open("a") as more:
        more.write("c")
    second = facts(file)
    for described, text in ((first, "ab"), (second, "abc")):
        (image / str(described.files[0].size)).mkdir()
        (image / str(described.files[0].size) / name_in_image(0)).write_text(text)
    if first_is_longer:
        first, second = second, first
    with file.open("a") as more:
        more.write("after the snapshot")
    if deleted:
        file.unlink()
    Daemon(state).put_back(1, image / str(first.files[0].size), first)
    found = file.stat()
    Daemon(state).mark(1, Mark.HELD)

    said = "in another rank of the job|by another rank of the job"
    with pytest.raises(Refused, match=said):
        Daemon(state).put_back(2, image / str(second.files[0].size), second)
    assert (file.stat().st_ino, file.stat().st_size) == (found.st_ino, first.files[0].size)
    done = Daemon(state).put_back(2, image / str(second.files[0].size), second, Policy.KEEP)
    assert done.sizes == {str(file): first.files[0].size}
    assert file.stat().st_ino == found.st_ino


def test_rank_whose_copy_is_gone_keeps_nobody_from_its_files(folder: Path, image: Path, state: Path) -> None:  # noqa: F811
    file = written(folder, "shared.log", "ab")
    shorter = facts(file)
    file.write_text("abc")
    longer = facts(file)
    (image / name_in_image(0)).write_text("abc")
    Daemon(state).put_back(1, image, shorter)
    assert file.read_text() == "ab"
    for mark in (None, Mark.HELD, Mark.DISCARDED):
        if mark is not None:
            Daemon(state).mark(1, mark)
        if mark is not Mark.HELD:
            Daemon(state).put_back(2, image, longer)
            assert file.read_text() == "abc"


KILLED = """
import os, signal, sys
from snapshotd.files import cut_back
cut_back._BLOCK_BYTES = 4
left = int(sys.argv[7])
def write(file, block, write=os.write):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return write(file, block)
cut_back.os.write = write
os.setegid(int(sys.argv[6]))
os.seteuid(int(sys.argv[6]))
cut_back.order_cut(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6]))
"""


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_tail_that_was_being_copied_when_all_was_killed_is_completed(folder: Path, blocks: int) -> None:  # noqa: F811
    file = written(folder, "train.log", "ab")
    described = facts(file)
    with file.open("a") as more:
        more.write("0123456789")
    fact, tail = described.files[0], folder / f"train.log.rolled-back-{RECORD}"
    asked = [str(file), fact.inode, fact.born_ns, fact.size, f"rolled-back-{RECORD}", USER.user_id, blocks]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, asked)])
    assert killed.returncode == -signal.SIGKILL
    assert (file.read_text(), tail.read_text()) == ("ab0123456789", "0123456789"[: 4 * blocks])
    cut(described)
    assert (file.read_text(), tail.read_text()) == ("ab", "0123456789")


@pytest.mark.parametrize("owner", [USER.user_id, 4712])
def test_tail_goes_into_no_file_of_another_user_or_with_another_name(
    folder: Path,  # noqa: F811
    owner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.moves.test_changed_files import Impatient

    monkeypatch.setattr(changed_files, "UserFiles", Impatient)
    file = written(folder, "train.log", "ab")
    described = facts(file)
    file.write_text("abcdef")
    tail = written(folder, f"train.log.rolled-back-{RECORD}", "cd", owner)
    if owner == USER.user_id:
        os.link(tail, folder / "public")
    with pytest.raises(Refused, match="exists"):
        cut(described)
    assert (file.read_text(), tail.read_text()) == ("abcdef", "cd")
