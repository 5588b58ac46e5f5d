"""Files are read as the rank itself has them: what a hostile user puts at their paths is neither read nor sent."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.files.as_user import User, user_of_rank
from snapshotd.files.held import Held, open_held, open_readable
from snapshotd.preflight import list_carried
from snapshotd.preflight.digest import content_digest
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.survey import add_digests
from tests.preflight.conftest import Starter
from tests.preflight.ranks import Child

USER_ID = 1500
DROP = f"import ctypes; os.setgroups([1502]); os.setresgid(*[{USER_ID}] * 3); os.setresuid(*[{USER_ID}] * 3)\n"


@pytest.fixture
def top() -> Iterator[Path]:
    """`job` is the user's, `root` is root's; with a file of the same name in both."""
    made = Path(tempfile.mkdtemp(prefix="held-"))
    made.chmod(0o755)
    for name, mode in (("job", 0o755), ("root", 0o700)):
        (made / name).mkdir()
        (made / name).chmod(mode)
        (made / name / "file").write_text(f"in {name}")
    os.chown(made / "job", USER_ID, USER_ID)
    os.chown(made / "job" / "file", USER_ID, USER_ID)
    os.chown(made, USER_ID, USER_ID)
    yield made
    shutil.rmtree(made)


def held_of(child: Child, top: Path) -> dict[str, Held]:
    return {os.path.relpath(path, top): held for path, held in list_carried(child.pids, [str(top)]).held.items()}


def text_of(held: Held, user: User) -> str:
    with os.fdopen(open_held(held, user)) as file:
        return file.read()


def swap(top: Path) -> None:
    """What the user's other processes do while the rank is frozen."""
    (top / "job").rename(top / "away")
    (top / "job").symlink_to(top / "root")


@pytest.mark.parametrize(
    "has",
    [
        "open('file')",
        "open('file', 'r+')",
        "open('file', 'a')",
        "__import__('mmap').mmap(os.open('file', 0), 0, prot=1)",
    ],
)
def test_directory_swapped_for_a_link_does_not_lead_to_root_s_file(rank: Starter, top: Path, has: str) -> None:
    child = rank(f"import mmap\n{DROP}os.chdir('{top}/job'); kept = {has}; os.chdir('/')")
    user = user_of_rank(child.pid, 0)
    assert user == User(USER_ID, USER_ID, (1502,))
    held = held_of(child, top)["job/file"]
    swap(top)
    assert (top / "job" / "file").read_text() == "in root"  # what its path leads to
    assert text_of(held, user) == "in job"


def test_digest_is_that_of_the_rank_s_own_file(rank: Starter, top: Path) -> None:
    child = rank(f"{DROP}kept = open('{top}/job/file')")
    survey = Inspection(child.pids, child.pid, []).survey
    swap(top)
    add_digests(survey.facts, survey.held, seconds=60)
    (fact,) = [fact for fact in survey.facts if fact.path == f"{top}/job/file"]
    with (top / "away" / "file").open("rb") as file:
        assert fact.digest == content_digest(file.fileno(), fact.size)


def test_descriptor_without_access_does_not_make_root_read_the_file(rank: Starter, top: Path) -> None:
    """A hard link to root's file, opened with O_PATH, which needs no permission at all."""
    (top / "root" / "file").chmod(0o600)
    os.link(top / "root" / "file", top / "job" / "secret")
    child = rank(f"{DROP}kept = os.open('{top}/job/secret', os.O_PATH)")
    user = user_of_rank(child.pid, 0)
    with pytest.raises(PermissionError):
        text_of(held_of(child, top)["job/secret"], user)
    facts, _ = child.inspect(carry_paths=[])
    assert [fact.digest for fact in facts.files if fact.path.endswith("/secret")] == [b""]


@pytest.mark.parametrize(("mode", "allowed"), [(0o622, False), (0o666, True)])
def test_file_that_is_only_written_is_read_if_its_user_may(rank: Starter, top: Path, mode: int, allowed: bool) -> None:
    """A log that belongs to another user."""
    (top / "job" / "log").write_text("lines")
    (top / "job" / "log").chmod(mode)
    child = rank(f"{DROP}kept = open('{top}/job/log', 'a')")
    user = user_of_rank(child.pid, 0)
    held = held_of(child, top)["job/log"]
    assert not held.readable
    if allowed:
        assert text_of(held, user) == "lines"
    else:
        with pytest.raises(PermissionError):
            text_of(held, user)


def test_descriptor_that_is_another_file_by_now_is_not_opened(rank: Starter, top: Path) -> None:
    """Not even a device, whose opening has effects: it is recognised without being opened."""
    child = rank(f"{DROP}kept = os.open('{top}/job/file', 0)")
    held = held_of(child, top)["job/file"]
    child.then("other = os.open('/dev/null', os.O_PATH); os.dup2(other, kept)")
    with pytest.raises(OSError, match="another file") as error:
        open_readable(held)
    assert error.value.errno == errno.ESTALE
    with pytest.raises(OSError, match="another file"):
        open_held(held, User(USER_ID, USER_ID))


def test_rank_that_became_root_is_served_as_the_user_who_registered_it(rank: Starter) -> None:
    assert user_of_rank(rank().pid, USER_ID) == User(USER_ID, 65534)
