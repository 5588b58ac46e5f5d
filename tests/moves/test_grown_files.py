"""Files that a rank had open for writing at a snapshot are cut back after a rollback, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from snapshotd.api.errors import Refused
from snapshotd.files.as_user import User
from snapshotd.moves.target import grown_files
from snapshotd.moves.tree_facts import File, MappedFile, OpenFile, ProcessFacts, TreeFacts
from snapshotd.preflight.objects import Kind
from snapshotd.proc.privileges import Credentials

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")]

USER = User(4711, 4711)
RECORD = "m-0000000000cc"
CREDENTIALS = Credentials((4711,) * 4, (4711,) * 4, (), 0, 0, 0, 0, False, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of the rank's user, which that user can reach."""
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    made = tmp_path / "data"
    made.mkdir()
    os.chown(made, *USER[:2])
    return made


def written(folder: Path, name: str, text: str, user_id: int = USER.user_id) -> Path:
    made = folder / name
    made.write_text(text)
    os.chown(made, user_id, user_id)
    return made


def facts(*files: Path, flags: int = os.O_WRONLY | os.O_APPEND, rights: str = "") -> TreeFacts:
    """Of a rank that has these files open now."""
    found = []
    for path in files:
        stat = path.stat()
        ids = (stat.st_uid, stat.st_gid)
        found.append(File(str(path), Kind.FILE.name, stat.st_mode, *ids, inode=stat.st_ino, size=stat.st_size))
    opened = [OpenFile(3 + index, flags, index) for index in range(len(found))]
    mapped = [MappedFile(0, 4096, 0, rights, index) for index in range(len(found))] if rights else []
    return TreeFacts(found, [ProcessFacts(1, CREDENTIALS, {}, "/", "/", "/bin/x", opened, mapped)])


def cut(described: TreeFacts, carry: tuple[str, ...] = (), *, same_node: bool = True) -> list[str]:
    return grown_files.cut_back(described, USER, RECORD, carry, same_node=same_node)


def test_file_that_grew_is_cut_back_and_its_tail_is_kept(folder: Path) -> None:
    file = written(folder, "train.log", "step 1\n")
    described = facts(file)
    with file.open("a") as more:
        more.write("step 2\nstep 3\n")
    (said,) = cut(described)
    assert file.read_text() == "step 1\n"
    tail = folder / f"train.log.rolled-back-{RECORD}"
    assert tail.read_text() == "step 2\nstep 3\n"
    assert (tail.stat().st_uid, tail.stat().st_mode & 0o777) == (USER.user_id, 0o600)
    assert f"{file} is cut back to 7 bytes; the 14 bytes after that are in {tail.name}" == said
    assert cut(described) == [], "again: there is nothing left to do"


def test_attempt_that_was_interrupted_after_the_copy_is_continued(folder: Path) -> None:
    file = written(folder, "train.log", "ab")
    described = facts(file)
    file.write_text("abcdef")
    written(folder, f"train.log.rolled-back-{RECORD}", "cdef")
    cut(described)
    assert file.read_text() == "ab"


def test_other_file_in_the_place_of_the_tail_is_not_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grown_files, "UserFiles", Impatient)
    file = written(folder, "train.log", "ab")
    described = facts(file)
    file.write_text("abcdef")
    other = written(folder, f"train.log.rolled-back-{RECORD}", "mine")
    with pytest.raises(Refused, match="exists"):
        cut(described)
    assert (file.read_text(), other.read_text()) == ("abcdef", "mine")


class Impatient:
    """Cuts back in this process, and does not wait for other ranks."""

    def __init__(self, *_given: object, **_more: object) -> None: ...

    def __enter__(self) -> Impatient:
        return self

    def __exit__(self, *_given: object) -> None: ...

    def ask(self, _do: str, size_bytes: int, **order: object) -> tuple[dict[str, object], list[int]]:
        from snapshotd.files import cut_back

        cut_back.WAIT_S = 0.0
        return cut_back.order_cut(**order, user_id=USER.user_id), []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: file.unlink(), "deleted or renamed"),
        (lambda file: (file.unlink(), file.symlink_to("/etc/passwd")), "replaced by another file"),
        (lambda file: (file.rename(f"{file}.old"), file.write_text("step 1\nmore")), "replaced by another file"),
        (lambda file: file.write_text(""), "become shorter"),
        (lambda file: shutil.rmtree(file.parent), "with its directory"),
    ],
)
def test_file_that_cannot_be_put_back_is_refused(folder: Path, change: object, why: str) -> None:
    file = written(folder, "train.log", "step 1\n")
    described = facts(file)
    change(file)  # type: ignore[operator]
    with pytest.raises(Refused, match=why) as refused:
        cut(described)
    assert "migrator job rollback" in refused.value.advice
    assert cut(described, (str(folder),)) == [], "it is in the image, and is put into place later"


def test_file_of_another_user_is_not_touched(folder: Path) -> None:
    file = written(folder, "shared.log", "a", user_id=4712)
    described = facts(file)
    file.write_text("abc")
    file.chmod(0o666)
    with pytest.raises(Refused, match="belongs to user 4712"):
        cut(described)
    assert file.read_text() == "abc"


def test_only_files_that_were_open_for_writing_are_cut_back(folder: Path) -> None:
    file = written(folder, "data.bin", "ab")
    reading, mapped = facts(file, flags=os.O_RDONLY), facts(file, flags=os.O_RDONLY, rights="rw-s")
    file.write_text("abc")
    assert cut(reading) == []
    assert file.read_text() == "abc"
    assert len(cut(mapped)) == 1
    assert file.read_text() == "ab"


def test_carried_file_is_cut_back_only_on_the_node_that_had_it(folder: Path) -> None:
    file = written(folder, "state", "ab")
    described = facts(file)
    file.write_text("abc")
    assert cut(described, (str(folder),), same_node=False) == []
    assert file.read_text() == "abc"
    assert len(cut(described, (str(folder),))) == 1
    assert file.read_text() == "ab"
