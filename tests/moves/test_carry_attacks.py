"""What a hostile user tries with carried files. `node.root` has files of root that others may neither read nor write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Refused
from snapshotd.files.as_user import ROOT, UserFiles
from snapshotd.moves.carry import Made
from tests.moves.carry_places import USER, Place, fact


def by_user(code: str) -> subprocess.Popen[bytes]:
    """A program of the user. It drops root's rights itself, because the user may not be able to execute this Python."""
    drop = f"import ctypes, os; os.setgroups([]); os.setresgid(*[{USER.group_id}] * 3); os.setresuid(*[{USER.user_id}] * 3)"
    return subprocess.Popen([sys.executable, "-I", "-c", f"{drop}\n{code}"])


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
    ]
    for user in (USER, ROOT):
        (node.images / "carry-1").write_text("#!/bin/sh")
        made: list[Made] = []
        modes = node.carry.place(node.images, facts, user, made.extend)
        assert modes == {one.path: one.mode & ~0o7000 for one in facts}
        assert [stat.S_IMODE(Path(one.path).stat().st_mode) for one in facts] == [0o777, 0o755]
        node.carry.take_away(made, user)


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
    """Whichever side wins the race, root's directory is not written to."""
    for number in range(5):
        made: list[Made] = []
        facts = [
            fact(node.local / "job", stat.S_IFDIR | 0o755),
            fact(node.local / "job" / f"file-{number}"),
            fact(node.local / "job" / f"fifo-{number}", stat.S_IFIFO | 0o600),
        ]
        (node.images / "carry-1").write_text("content")
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
    # EACCES where the kernel lets no process follow a user's link in a sticky directory (fs.protected_symlinks).
    assert 0 in outcomes
    assert outcomes & {errno.ELOOP, errno.EACCES}
    assert outcomes <= {0, errno.ELOOP, errno.EACCES, errno.EAGAIN}


def test_undo_removes_only_what_the_move_made(node: Place) -> None:
    folder = node.folder("job")
    made = node.put(fact(folder / "one"), fact(folder / "two"), fact(folder / "three"))
    assert len(made) == 3
    (folder / "one").rename(folder / "kept")
    (folder / "one").write_text("another user's")
    victim = node.root / "two"
    victim.write_text("of root")
    node.carry.take_away(made[:1], USER)
    assert (folder / "one").read_text() == "another user's"
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
    node.carry.remember([str(folder / "file")], USER)
    node.put(fact(folder / "file"), content="new")  # replaces the name, as the user could
    assert (secret.read_text(), secret.stat().st_uid, secret.stat().st_nlink) == ("of root", 0, 1)
    assert (folder / "file").stat().st_uid == 1500
