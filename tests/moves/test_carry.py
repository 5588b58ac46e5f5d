"""Carried files: a foreign file is never overwritten, and an undo removes what was placed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged, Refused
from snapshotd.files.as_user import ROOT, User
from snapshotd.files.user_look import UserLook
from snapshotd.moves.carry import Carry, Made
from tests.moves.carry_places import OTHER_ID, USER, Place, fact


def may_replace(node: Place, path: Path) -> bool:
    with UserLook(ROOT) as look:
        seen = look.stat_without_links(str(path))
    assert seen is not None
    return node.carry.may_replace(str(path), seen)


def ignore(_made: list[Made]) -> None:
    """Of tests that do not undo."""


def test_files_directories_and_fifos_are_placed_and_removed(node: Place) -> None:
    folder = node.local / "d"
    made = node.put(
        fact(folder, stat.S_IFDIR | 0o700),
        fact(folder / "file", group_id=1502),
        fact(folder / "fifo", stat.S_IFIFO | 0o620),
    )
    assert [path for path, _, _ in made] == [str(folder), str(folder / "file"), str(folder / "fifo")]
    found = (folder / "file").stat()
    assert (folder / "file").read_text() == "content"
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 1500, 1502)
    assert found.st_mtime_ns == 10**18
    fifo = (folder / "fifo").stat()
    assert stat.S_ISFIFO(fifo.st_mode)
    assert (stat.S_IMODE(fifo.st_mode), fifo.st_uid) == (0o620, 1500)
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (1500, 0o700)
    assert list(node.images.iterdir()) == []
    node.carry.take_away(made, USER)
    assert not folder.exists()


def test_holes_stay_holes(node: Place) -> None:
    image = node.images / "carry-0"
    with image.open("wb") as file:
        file.write(b"begin")
        file.seek(64 << 20)
        file.write(b"end")
        file.truncate(65 << 20)
    content = image.read_bytes()
    node.carry.place(node.images, [fact(node.local / "file")], USER, ignore)
    assert (node.local / "file").read_bytes() == content
    assert (node.local / "file").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    ("mode", "user_id", "group_id", "says"),
    [
        (stat.S_IFDIR | 0o755, 0, 0, "it belongs to user 0, not to the rank's"),
        (stat.S_IFDIR | 0o777, OTHER_ID, 1500, "it belongs to user 1501, not to the rank's"),
        (stat.S_IFDIR | 0o755, 1500, 0, "it has group 0, which the rank's user is not in"),
        (stat.S_IFREG | 0o644, 0, 0, "it belongs to user 0"),
        (stat.S_IFREG | 0o660, 1500, 42, "it has group 42"),
        (stat.S_IFIFO | 0o660, 1500, 42, "it has group 42"),
    ],
)
def test_nothing_is_made_that_its_user_could_not_own(
    node: Place, mode: int, user_id: int, group_id: int, says: str
) -> None:
    """A node could send anything: a directory of another user, or a file of a group such as that of /etc/shadow."""
    with pytest.raises(Refused, match=f"carried-files: .*{says}"):
        node.put(fact(node.local / "theirs", mode, user_id, group_id))
    assert list(node.local.iterdir()) == []
    node.put(fact(node.local / "theirs", mode, user_id, group_id), user=ROOT)
    found = (node.local / "theirs").stat()
    assert (found.st_uid, found.st_gid) == (user_id, group_id), "a rank of root may have files of anyone"


def test_what_another_owner_has_there_already_is_used(node: Place) -> None:
    """A rank that maps a library which root installed in /tmp, on both nodes."""
    folder = node.local / "software"
    folder.mkdir(mode=0o755)
    (folder / "library.so").write_text("content")
    (folder / "library.so").chmod(0o644)
    facts = (fact(folder, stat.S_IFDIR | 0o755, 0, 0), fact(folder / "library.so", stat.S_IFREG | 0o644, 0, 0))
    assert node.put(*facts) == []
    with pytest.raises(Refused, match="other content"):
        node.put(*facts, content="another")


def test_file_is_not_placed_where_its_user_may_not_write(node: Place) -> None:
    folder = node.folder("theirs", OTHER_ID)
    with pytest.raises(Refused, match="user 1500"):
        node.put(fact(folder / "file"))
    assert list(folder.iterdir()) == []


def test_directory_of_another_user_is_not_used(node: Place) -> None:
    folder = node.folder("job", OTHER_ID)
    folder.chmod(0o777)
    with pytest.raises(Refused, match="belongs to user 1501"):
        node.put(fact(folder, stat.S_IFDIR | 0o777), fact(folder / "file"))
    assert list(folder.iterdir()) == []


def test_file_with_other_content_is_not_overwritten(node: Place) -> None:
    (node.local / "file").write_text("mine")
    os.chown(node.local / "file", 1500, 1500)
    (node.local / "file").chmod(0o640)
    with pytest.raises(Refused, match=r"carried-files: .* other content"):
        node.put(fact(node.local / "file"))
    assert (node.local / "file").read_text() == "mine"
    os.chown(node.local / "file", OTHER_ID, 1500)
    with pytest.raises(Refused, match=r"carried-files: .* owner"):
        node.put(fact(node.local / "file"), content="mine")


def test_file_with_the_same_content_is_accepted(node: Place) -> None:
    (node.local / "file").write_text("same")
    (node.local / "file").chmod(0o640)
    os.chown(node.local / "file", 1500, 1500)
    assert node.put(fact(node.local / "file"), content="same") == []


def test_file_that_a_rank_left_may_be_replaced_until_it_is_changed(node: Place) -> None:
    left = node.local / "file"
    node.put(fact(left), content="old")
    node.carry.remember([str(left)], USER)
    assert may_replace(node, left)
    node.put(fact(left), content="new")
    assert left.read_text() == "new"
    node.carry.remember([str(left)], USER)
    os.utime(left, ns=(1, 1))
    assert not may_replace(node, left)


def test_only_what_the_rank_s_user_can_see_is_remembered(node: Place) -> None:
    """A rank chooses the names of its files, and its user what they lead to later."""
    secret = node.root / "secret"
    secret.write_text("of root")
    folder = node.folder("job")
    (folder / "link").symlink_to(node.root)
    (folder / "file").write_text("of the rank")
    node.carry.remember(
        [str(secret), str(folder / "link" / "secret"), str(folder / "file"), str(folder / "gone")], USER
    )
    assert list(json.loads(node.carry.ledger.read_text())) == [str(folder / "file")]


def test_files_of_other_users_are_not_looked_at(node: Place) -> None:
    """What is remembered for one user stays, whatever another user's rank left. What was replaced is forgotten."""
    one, other = node.local / "one", node.local / "other"
    for path in (one, other):
        path.write_text("left")
    node.carry.ledger.write_text(json.dumps({"/from/an/older/version": [1, 2, 3, 4], "/damaged": "?"}))
    node.carry.remember([str(other)], User(OTHER_ID, OTHER_ID))
    other.unlink()
    node.carry.remember([str(one)], USER)
    assert list(json.loads(node.carry.ledger.read_text())) == ["/from/an/older/version", str(other), str(one)]
    one.unlink()
    node.carry.remember([], USER)
    assert list(json.loads(node.carry.ledger.read_text())) == ["/from/an/older/version", str(other)]


@pytest.mark.parametrize("path", ["/etc/passwd", "{local}/../x", "{local}", "relative"])
def test_path_outside_the_carry_paths_is_rejected(node: Place, path: str) -> None:
    with pytest.raises(Damaged):
        node.put(fact(Path(path.format(local=node.local))), user=ROOT)


def test_carry_path_that_is_a_link_of_the_administrator_is_followed(node: Place) -> None:
    link = node.root / "tmp"
    link.symlink_to(node.local)
    carry = Carry(node.root, [str(link)])
    (node.images / "carry-0").write_text("content")
    carry.place(node.images, [fact(link / "file")], USER, ignore)
    assert (node.local / "file").read_text() == "content"


def test_files_are_removed_if_the_daemon_dies_before_it_has_journalled_them(node: Place) -> None:
    """The child notices it. What a move made and no journal knows would stay for ever."""

    def die(made: list[Made]) -> None:
        assert len(made) == 3
        assert (node.local / "d" / "file").exists()
        raise KeyboardInterrupt

    facts = [
        fact(node.local / "d", stat.S_IFDIR | 0o700),
        fact(node.local / "d" / "file"),
        fact(node.local / "other"),
    ]
    for index in (1, 2):
        (node.images / f"carry-{index}").write_text("content")
    with pytest.raises(KeyboardInterrupt):
        node.carry.place(node.images, facts, USER, die)
    assert list(node.local.iterdir()) == []
