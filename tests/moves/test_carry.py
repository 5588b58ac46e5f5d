"""Carried files: a foreign file is never overwritten, an undo removes what was placed, and no user gains root's rights."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Refused
from snapshotd.files.as_user import ROOT, User, UserFiles
from snapshotd.moves.carry import Carry, Made

USER = User(1500, 1500, (1502,))
OTHER_ID = 1501


@dataclass
class Place:
    """A node with one carry path, which is like /tmp."""

    carry: Carry
    local: Path
    images: Path
    root: Path  # of root; nobody else reaches it

    def put(self, *facts: pb.FileFact, content: str = "content", user: User = USER) -> list[Made]:
        made: list[Made] = []
        for index, one in enumerate(facts):
            if stat.S_ISREG(one.mode):
                (self.images / f"carry-{index}").write_text(content)
        self.carry.place(self.images, facts, user, made.extend)
        return made

    def folder(self, name: str, user_id: int = USER.user_id) -> Path:
        path = self.local / name
        path.mkdir(mode=0o755)
        os.chown(path, user_id, user_id)
        return path


@pytest.fixture
def node() -> Iterator[Place]:
    """Not below pytest's own folder, which other users cannot enter."""
    top = Path(tempfile.mkdtemp(prefix="carry-"))
    top.chmod(0o755)
    local, images, root = top / "local", top / "images", top / "root"
    for path, mode in ((local, 0o1777), (images, 0o700), (root, 0o700)):
        path.mkdir()
        path.chmod(mode)
    yield Place(Carry(top, [str(local)]), local, images, root)
    shutil.rmtree(top)


def fact(
    path: Path, mode: int = stat.S_IFREG | 0o640, user_id: int = USER.user_id, group_id: int = USER.group_id
) -> pb.FileFact:
    return pb.FileFact(path=str(path), mode=mode, mtime_ns=10**18, user_id=user_id, group_id=group_id)


def ignore(_made: list[Made]) -> None:
    """Of tests that do not undo."""


def by_user(code: str) -> subprocess.Popen[bytes]:
    """A program of the user. It drops root's rights itself, because the user may not be able to execute this Python."""
    drop = f"import ctypes, os; os.setgroups([]); os.setresgid(*[{USER.group_id}] * 3); os.setresuid(*[{USER.user_id}] * 3)"
    return subprocess.Popen([sys.executable, "-I", "-c", f"{drop}\n{code}"])


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


def test_files_of_another_owner_are_placed_with_that_owner(node: Place) -> None:
    """A rank that maps a library which root installed in /tmp. Its user can neither write the copy nor its directory."""
    folder = node.local / "software"
    made = node.put(
        fact(folder, stat.S_IFDIR | 0o755, 0, 0),
        fact(folder / "library.so", stat.S_IFREG | 0o644, 0, 0),
        fact(node.local / "shared", stat.S_IFREG | 0o666, OTHER_ID, 1500),
    )
    assert [
        (path.stat().st_uid, path.stat().st_gid) for path in (folder, folder / "library.so", node.local / "shared")
    ] == [
        (0, 0),
        (0, 0),
        (OTHER_ID, 1500),
    ]
    node.carry.take_away(made, USER)
    assert list(node.local.iterdir()) == []


def test_file_is_not_placed_where_its_user_may_not_write(node: Place) -> None:
    folder = node.folder("theirs", OTHER_ID)
    for owner in (USER.user_id, OTHER_ID, 0):
        with pytest.raises(Refused, match="user 1500"):
            node.put(fact(folder / "file", user_id=owner))
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
    node.carry.remember([str(left)])
    assert node.carry.may_replace(str(left))
    node.put(fact(left), content="new")
    assert left.read_text() == "new"
    node.carry.remember([str(left)])
    os.utime(left, ns=(1, 1))
    assert not node.carry.may_replace(str(left))


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
        fact(node.local / "theirs", user_id=OTHER_ID),
    ]
    for index in (1, 2):
        (node.images / f"carry-{index}").write_text("content")
    with pytest.raises(KeyboardInterrupt):
        node.carry.place(node.images, facts, USER, die)
    assert list(node.local.iterdir()) == []


# ---- what a hostile user tries. `node.root` has files of root, which nobody else may read or write.


def test_link_in_place_of_a_directory_is_not_followed(node: Place) -> None:
    """Even for a rank of root, whose rights would suffice."""
    (node.local / "link").symlink_to(node.root)
    os.chown(node.local / "link", 1500, 1500, follow_symlinks=False)
    for user in (USER, ROOT):
        with pytest.raises(Refused):
            node.put(fact(node.local / "link" / "file", user_id=user.user_id, group_id=user.group_id), user=user)
    assert list(node.root.iterdir()) == []


def test_link_at_the_name_is_not_followed(node: Place) -> None:
    folder = node.folder("job")
    (folder / "file").symlink_to(node.root / "new")
    (folder / "fifo").symlink_to(node.root / "fifo")
    (folder / "folder").symlink_to(node.root / "folder")
    for one in (
        fact(folder / "file"),
        fact(folder / "fifo", stat.S_IFIFO | 0o600),
        fact(folder / "folder", stat.S_IFDIR | 0o700),
    ):
        with pytest.raises(Refused):
            node.put(one)
    assert list(node.root.iterdir()) == []


def test_links_at_every_name_that_could_be_predicted_are_not_followed(node: Place) -> None:
    """The former name of the unfinished file had the daemon's pid in it."""
    folder = node.folder("job")
    secret = node.root / "secret"
    secret.write_text("of root")
    for pid in range(max(1, os.getpid() - 50), os.getpid() + 50):
        (folder / f"file.{pid}.carried").symlink_to(secret)
    node.put(fact(folder / "file"))
    assert (secret.read_text(), secret.stat().st_uid) == ("of root", 0)
    assert (folder / "file").read_text() == "content"


def test_set_user_id_is_not_carried(node: Place) -> None:
    facts = [
        fact(node.local / "folder", stat.S_IFDIR | 0o3777),
        fact(node.local / "folder" / "program", stat.S_IFREG | 0o6755),
        fact(node.local / "roots", stat.S_IFREG | 0o4755, 0, 0),
    ]
    (node.images / "carry-1").write_text("#!/bin/sh")
    (node.images / "carry-2").write_text("#!/bin/sh")
    modes = node.carry.place(node.images, facts, USER, ignore)
    assert modes == {one.path: one.mode & ~0o7000 for one in facts}
    assert [stat.S_IMODE(Path(one.path).stat().st_mode) for one in facts] == [0o777, 0o755, 0o755]


@pytest.fixture
def swapping(node: Place) -> Iterator[None]:
    """The user swaps local/job and a link to root's directory all the time."""
    node.folder("job")
    (node.local / "job" / "file").write_text("of the user")
    (node.root / "file").write_text("of root")
    exchange = "libc.renameat2(-100, b'job', -100, b'link', 2)"
    swap = by_user(
        f"libc = ctypes.CDLL(None); os.chdir({str(node.local)!r})\n"
        f"os.symlink({str(node.root)!r}, 'link')\nwhile {exchange} == 0: pass"
    )
    try:
        deadline = time.monotonic() + 60
        while not (node.local / "job").is_symlink():
            assert time.monotonic() < deadline
        yield
        assert swap.poll() is None
    finally:
        swap.kill()
        swap.wait()
    assert [path.name for path in node.root.iterdir()] == ["file"]
    assert (node.root / "file").read_text() == "of root"


@pytest.mark.usefixtures("swapping")
def test_directory_that_becomes_a_link_meanwhile_does_not_lead_to_root_s_files(node: Place) -> None:
    """Whoever wins the race, root's directory is not written to."""
    for number in range(5):
        made: list[Made] = []
        facts = [
            fact(node.local / "job", stat.S_IFDIR | 0o755),
            fact(node.local / "job" / f"file-{number}"),
            fact(node.local / "job" / f"theirs-{number}", user_id=OTHER_ID),
        ]
        for index in (1, 2):
            (node.images / f"carry-{index}").write_text("content")
        with contextlib.suppress(Refused):
            node.carry.place(node.images, facts, USER, made.extend)
        node.carry.take_away(made, USER)
        assert [path.name for path in node.root.iterdir()] == ["file"]


@pytest.mark.usefixtures("swapping")
def test_child_is_never_led_elsewhere(node: Place) -> None:
    """A child of root here, whose rights would suffice for what the link leads to."""
    outcomes = set()
    with UserFiles(ROOT) as files:
        for _ in range(3000):
            try:
                _, folder = files.ask_fd("folder", root=str(node.local), path="job")
            except OSError as error:
                outcomes.add(error.errno)
                continue
            outcomes.add(0)
            found = os.fstat(folder)
            os.close(folder)
            assert found.st_uid == USER.user_id
    assert outcomes == {0, errno.ELOOP} or outcomes == {0, errno.ELOOP, errno.EAGAIN}


def test_undo_removes_only_what_the_move_made(node: Place) -> None:
    folder = node.folder("job")
    made = node.put(fact(folder / "one"), fact(folder / "two"), fact(folder / "three", user_id=OTHER_ID))
    assert len(made) == 3
    (folder / "one").rename(folder / "kept")
    (folder / "one").write_text("of somebody else")
    victim = node.root / "two"
    victim.write_text("of root")
    node.carry.take_away(made[:1], USER)
    assert (folder / "one").read_text() == "of somebody else"
    folder.rename(node.local / "away")
    folder.symlink_to(node.root)
    node.carry.take_away(made, USER)
    assert victim.read_text() == "of root"
    assert {path.name for path in (node.local / "away").iterdir()} == {"one", "two", "three", "kept"}
    folder.unlink()
    (node.local / "away").rename(folder)
    node.carry.take_away(made, USER)
    assert {path.name for path in folder.iterdir()} == {"one", "kept"}


def test_root_s_file_with_a_link_beside_the_rank_s_is_not_given_away(node: Place) -> None:
    """The file that a rank left is recorded by its identity; a hard link to root's file takes its place."""
    folder = node.folder("job")
    secret = node.root / "secret"
    secret.write_text("of root")
    node.put(fact(folder / "file"))
    (folder / "file").unlink()
    os.link(secret, folder / "file")
    node.carry.remember([str(folder / "file")])
    node.put(fact(folder / "file"), content="new")  # replaces the name, as the user could
    assert (secret.read_text(), secret.stat().st_uid, secret.stat().st_nlink) == ("of root", 0, 1)
    assert (folder / "file").stat().st_uid == 1500
