"""Files that a rank had open for writing at a snapshot become as they were after a rollback, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshotd.api.errors import Refused, Timeout
from snapshotd.files import cut_back, paths, put_back
from snapshotd.files.as_user import User
from snapshotd.files.held import Held
from snapshotd.files.put_back import Wanted
from snapshotd.holder.client import Holder
from snapshotd.holder.process import BATCH
from snapshotd.moves import tree_facts
from snapshotd.moves.changed_file import ChangedFile, Policy
from snapshotd.moves.kept_files import SMALL_BYTES, KeptFiles, PutBack, Small, name_in_image
from snapshotd.moves.source import open_files
from snapshotd.moves.target import changed_files
from snapshotd.moves.target.changed_files import Data, Settled
from snapshotd.moves.tree_facts import File, MappedFile, OpenFile, ProcessFacts, TreeFacts
from snapshotd.preflight.objects import Kind
from snapshotd.proc.privileges import Credentials

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="needs root: it becomes another user")]

USER = User(4711, 4711)
RECORD = "m-0000000000cc"
SUFFIX = f"rolled-back-{RECORD}"
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
        found.append(
            File(
                str(path),
                Kind.FILE.name,
                stat.st_mode,
                *ids,
                inode=stat.st_ino,
                size=stat.st_size,
                mtime_ns=stat.st_mtime_ns,
                born_ns=paths.born_ns(str(path)),
            )
        )
    opened = [OpenFile(3 + index, flags, index) for index in range(len(found))]
    mapped = [MappedFile(0, 4096, 0, rights, index) for index in range(len(found))] if rights else []
    return TreeFacts(found, [ProcessFacts(1, CREDENTIALS, {}, "/", "/", "/bin/x", opened, mapped)])


def settle(
    described: TreeFacts,
    policy: Policy = Policy.RESTORE,
    data: Data | None = None,
    carry: tuple[str, ...] = (),
    *,
    same_node: bool = True,
) -> Settled:
    data = data or Data(Path("/nonexistent"))
    return changed_files.settle(described, USER, SUFFIX, 0, policy, data, carry, same_node=same_node)


def cut(described: TreeFacts, carry: tuple[str, ...] = (), *, same_node: bool = True) -> list[str]:
    done = settle(described, Policy.REFUSE, None, carry, same_node=same_node)
    return [one.words for one in done.changed]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "image"
    made.mkdir(mode=0o700)
    return made


@contextmanager
def kept(*files: Path) -> Iterator[Data]:
    """As the process does that keeps them: descriptors."""
    handles = {index: os.open(path, os.O_PATH) for index, path in enumerate(files)}
    try:
        yield Data(Path("/nonexistent"), descriptors=handles)
    finally:
        for handle in handles.values():
            os.close(handle)


def only(done: Settled) -> ChangedFile:
    (one,) = done.changed
    return one


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
    assert f"{file} has grown since the snapshot: cut back to 7 bytes; what was cut off is in {tail.name}" == said
    assert cut(described) == [said], "again: there is nothing left to do, and it is reported all the same"


def test_attempt_that_was_interrupted_after_the_copy_is_continued(folder: Path) -> None:
    file = written(folder, "train.log", "ab")
    described = facts(file)
    file.write_text("abcdef")
    written(folder, f"train.log.rolled-back-{RECORD}", "cdef")
    cut(described)
    assert file.read_text() == "ab"


def test_other_file_in_the_place_of_the_tail_is_not_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_files, "UserFiles", Impatient)
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


def rename(file: Path) -> None:
    file.rename(f"{file}.old")


def replace(file: Path) -> None:
    rename(file)
    written(file.parent, file.name, "other")


def replace_by_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/passwd")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").touch()


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("deleted", Path.unlink),
    ("renamed", rename),
    ("replaced", replace),
    ("replaced", replace_by_link),
    ("replaced", replace_by_folder),
    ("deleted", lambda file: shutil.rmtree(file.parent)),
]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Path.unlink, "deleted or renamed"),
        (replace_by_link, "replaced by another file"),
        (replace, "replaced by another file"),
        (lambda file: file.write_text(""), "become shorter"),
        (lambda file: shutil.rmtree(file.parent), "deleted or renamed"),
    ],
)
def test_file_that_has_changed_is_refused_if_the_user_wants_that(
    folder: Path, change: Callable[[Path], object], why: str
) -> None:
    file = written(folder, "train.log", "step 1\n")
    described = facts(file)
    change(file)
    with pytest.raises(Refused, match=why) as refused:
        settle(described, Policy.REFUSE)
    assert "migrator job rollback" in refused.value.advice
    assert str(file) in refused.value.message
    settle(described, Policy.REFUSE, None, (str(folder),))  # it is in the image, and is put into place later


@pytest.mark.parametrize(("what", "change"), CHANGES)
def test_file_is_put_back_from_its_descriptor_and_what_was_there_is_kept(
    folder: Path, what: str, change: Callable[[Path], object]
) -> None:
    folder = folder / "run"
    folder.mkdir()
    os.chown(folder, *USER[:2])
    file = written(folder, "train.log", "step 1\n")
    file.chmod(0o640)
    described = facts(file)
    with kept(file) as data:
        with file.open("a") as more:
            more.write("after the snapshot\n")
        change(file)
        before = [path.lstat().st_ino for path in [file] if os.path.lexists(file)]
        done = only(settle(described, data=data))
        assert (done.path, done.change, done.action) == (str(file), what, "restored")
        assert file.read_text() == "step 1\n"
        found = file.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (*USER[:2], 0o640)
        assert (found.st_size, found.st_mtime_ns) == (described.files[0].size, described.files[0].mtime_ns)
        side = folder / f"train.log.rolled-back-{RECORD}"
        assert [path.lstat().st_ino for path in [side] if os.path.lexists(side)] == before
        assert done.beside == (side.name if before else "")
        if what == "renamed":
            assert done.now == f"{file}.old"
            assert Path(done.now).read_text() == "step 1\nafter the snapshot\n", "it is not touched"

        again = only(settle(described, data=data))  # the rollback is repeated
        assert (again.action, again.beside) == ("restored", done.beside)
        assert file.stat().st_ino == found.st_ino
    names = {file.name, *([side.name] if before else [])} | (
        {"train.log.old"} if (folder / "train.log.old").exists() else set()
    )
    assert {path.name for path in folder.iterdir()} == names, "nothing else is left"


def test_shortened_file_is_put_back_only_from_a_copy(folder: Path, image: Path) -> None:
    file = written(folder, "status", "step 1 of 100\n")
    described = facts(file)
    with kept(file) as data:
        os.truncate(file, 4)
        with pytest.raises(Refused, match=r"become shorter since the snapshot \(4 instead of 14 bytes\), and its data"):
            settle(described, data=data)
        assert file.read_text() == "step"
    (image / name_in_image(0)).write_text("step 1 of 100\n")
    done = only(settle(described, data=Data(image)))
    assert (done.change, done.action, file.read_text()) == ("shortened", "restored", "step 1 of 100\n")
    assert (folder / done.beside).read_text() == "step"


def test_file_that_was_shortened_and_then_deleted_is_refused(folder: Path) -> None:
    file = written(folder, "data", "0123456789")
    described = facts(file)
    with kept(file) as data:
        os.truncate(file, 3)
        file.unlink()
        with pytest.raises(Refused, match="3 of its 10 bytes are left"):
            settle(described, data=data)
    assert list(folder.iterdir()) == []


def test_file_whose_data_was_not_kept_is_refused(folder: Path) -> None:
    file = written(folder, "data", "0123456789")
    described = facts(file)
    file.unlink()
    with pytest.raises(Refused, match="its data was not kept on this node"):
        settle(described)


def test_second_replacement_is_kept_under_another_name(folder: Path) -> None:
    file = written(folder, "train.log", "ab")
    described = facts(file)
    with kept(file) as data:
        file.unlink()
        for number, text in ((1, "first"), (2, "second")):
            file.unlink(missing_ok=True)
            written(folder, "train.log", text)
            suffix = "" if number == 1 else ".2"
            assert only(settle(described, data=data)).beside == f"train.log.rolled-back-{RECORD}{suffix}"
    assert (folder / f"train.log.rolled-back-{RECORD}").read_text() == "first"
    assert (folder / f"train.log.rolled-back-{RECORD}.2").read_text() == "second"
    assert file.read_text() == "ab"


def without_nameless(opens: Callable[..., int]) -> Callable[..., int]:
    """open(2) of a file system such as NFS."""

    def act(path: str, flags: int, *given: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such operation here")
        return opens(path, flags, *given, **more)

    return act


@pytest.mark.parametrize("has_name", [False, True])
@pytest.mark.parametrize("renames", [1, 2])
def test_put_back_that_is_interrupted_at_a_rename_is_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch, renames: int, has_name: bool
) -> None:
    """Before and after what is there was set aside: as if the machine had failed, so that nothing is cleaned up."""
    file = written(folder, "train.log", "ab")
    wanted = Wanted(2, 0o100644, *USER[:2], 1_000_000_000)
    with open(file, "rb") as content:
        file.unlink()
        written(folder, "train.log", "other")
        left = renames

        def dying(does: Callable[..., None]) -> Callable[..., None]:
            def act(*given: Any, **more: Any) -> None:
                nonlocal left
                left -= 1
                if not left:
                    raise Died
                does(*given, **more)

            return act

        if has_name:
            monkeypatch.setattr(put_back.os, "open", without_nameless(os.open))  # type: ignore[attr-defined]
        monkeypatch.setattr(paths, "rename_to_free", dying(paths.rename_to_free))
        monkeypatch.setattr(put_back.os, "link", dying(os.link))  # type: ignore[attr-defined]
        monkeypatch.setattr(put_back.os, "unlink", lambda *given, **more: None)  # type: ignore[attr-defined]
        with pytest.raises(Died):
            put_back.order_put_back(str(file), str(folder), content.fileno(), wanted, "rolled-back-x", "0")
        monkeypatch.undo()
        assert "other" in {path.read_text() for path in folder.iterdir()}, "nothing of the user's is lost"
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == ([".train.log.rolled-back-x.0"] if has_name else []), (
            "nothing is left of a file without a name"
        )
        answer = put_back.order_put_back(str(file), str(folder), content.fileno(), wanted, "rolled-back-x", "0")
    assert (answer["beside"], answer["was_there"]) == ("train.log.rolled-back-x", False)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "train.log": "ab",
        "train.log.rolled-back-x": "other",
    }


class Died(BaseException):
    pass


def test_ranks_that_have_the_same_file_put_it_back_once(folder: Path) -> None:
    file = written(folder, "shared.log", "a" * 100_000)
    described = facts(file)
    with kept(file) as data, ThreadPoolExecutor(4) as threads:
        file.unlink()
        written(folder, "shared.log", "other")

        def one(rank: int) -> ChangedFile:
            return only(changed_files.settle(described, USER, SUFFIX, rank, Policy.RESTORE, data, same_node=True))

        done = list(threads.map(one, range(4)))
    assert {change.beside for change in done} == {f"shared.log.rolled-back-{RECORD}"}
    assert sorted(path.name for path in folder.iterdir()) == ["shared.log", f"shared.log.rolled-back-{RECORD}"]
    assert file.read_text() == "a" * 100_000


def test_rank_does_not_take_a_file_away_that_another_rank_has_put_back(folder: Path, image: Path) -> None:
    """Their images have other content of it: the first rank went on, and wrote, before the second was dumped."""
    file = written(folder, "shared.log", "ab")
    first = facts(file)
    file.write_text("abc")
    second = facts(file)
    with kept(file) as data:
        file.unlink()
        assert only(settle(first, data=data)).action == "restored"
        with pytest.raises(Refused, match="put back by another rank of the job, with other content"):
            settle(second, data=data)
        assert file.read_text() == "ab"
        assert only(settle(first, data=data)).action == "restored"
        assert only(settle(second, Policy.KEEP, data)).action == "kept"
    assert [path.name for path in folder.iterdir()] == ["shared.log"]


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("first_is_longer", [False, True])
def test_rank_does_not_take_a_file_away_that_another_rank_has_cut_back(
    folder: Path, image: Path, grows: bool, first_is_longer: bool
) -> None:
    """As above, for a file that is only written. The image has a copy of it, which would get its name."""
    file = written(folder, "shared.log", "ab")
    first = facts(file)
    with file.open("a") as more:
        more.write("c")
    second = facts(file)
    (image / name_in_image(0)).write_text("abc")
    if first_is_longer:
        first, second = second, first
    else:
        os.truncate(file, 2)
    if grows:
        with file.open("a") as more:
            more.write("after the snapshot")
    data = Data(image)
    settle(first, data=data)
    found = file.stat()
    said = f"open in another rank of the job with {first.files[0].size} bytes.* had {second.files[0].size} in this"
    with pytest.raises(Refused, match=said):
        settle(second, data=data)
    with pytest.raises(Refused, match=said):  # the rollback is repeated
        settle(second, data=data)
    settle(first, data=data)
    assert (file.stat().st_ino, file.stat().st_size) == (found.st_ino, first.files[0].size)
    done = settle(second, Policy.KEEP, data)
    assert (only(done).action, done.sizes) == ("kept", {str(file): first.files[0].size})


def test_file_that_one_rank_was_left_is_not_cut_back_by_another(folder: Path) -> None:
    file = written(folder, "shared.log", "abcdef")
    first = facts(file)
    os.truncate(file, 2)
    second = facts(file)
    os.truncate(file, 4)
    data = Data(Path("/nonexistent"))
    assert settle(first, Policy.KEEP, data).sizes == {str(file): 4}
    assert settle(second, Policy.KEEP, data).sizes == {str(file): 4}


def test_rollbacks_of_other_jobs_do_not_wait_for_one_that_puts_files_back() -> None:
    files = PutBack()
    with ThreadPoolExecutor(1) as threads, files.turn("a") as mine:
        mine["/x"] = [1]

        def other() -> dict[str, list[int]]:
            with files.turn("b") as theirs:
                return dict(theirs)

        assert threads.submit(other).result(timeout=30) == {}
    for number in range(200):  # it is forgotten only if it was not used for long
        with files.turn(str(number)), files.turn("a") as mine:
            assert mine == {"/x": [1]}


def test_other_file_that_has_got_the_inode_number_is_not_cut_back(folder: Path, image: Path) -> None:
    """As on NFS, where no descriptor keeps the number in use."""
    file = written(folder, "train.log", "another file")
    (now,) = facts(file).files
    assert now.born_ns, "the file system of this test says when a file was made"
    before = msgspec.structs.replace(now, size=2, born_ns=now.born_ns - 1)
    described = msgspec.structs.replace(facts(file), files=[before])
    with pytest.raises(Refused, match="replaced by another file since the snapshot, and its data was not kept"):
        settle(described)
    order: dict[str, Any] = {"inode": now.inode, "size": 2, "suffix": "x", "user_id": USER.user_id}
    with pytest.raises(OSError, match="replaced by another file"):
        cut_back.order_cut(str(file), born_ns=before.born_ns, **order)
    assert [path.read_text() for path in folder.iterdir()] == ["another file"]
    (image / name_in_image(0)).write_text("ab")
    done = only(settle(described, data=Data(image)))
    assert (done.change, file.read_text(), (folder / done.beside).read_text()) == ("replaced", "ab", "another file")
    described = facts(written(folder, "other.log", "ab"))
    unknown = msgspec.structs.replace(described.files[0], size=1, born_ns=0)
    assert len(cut(msgspec.structs.replace(described, files=[unknown]))) == 1, "its number is all that is known"


@pytest.mark.parametrize("bit", [0o4000, 0o2000, 0o1000])
def test_special_bits_are_not_set(folder: Path, bit: int) -> None:
    file = written(folder, "tool", "ab")
    file.chmod(bit | 0o755)
    described = facts(file)
    with kept(file) as data, open(file, "rb") as content:
        file.unlink()
        with pytest.raises(Refused, match="set-user-id, set-group-id and sticky bits are not set again"):
            settle(described, data=data)
        wanted = Wanted(2, described.files[0].mode, *USER[:2], 1_000_000_000)
        for is_there in (False, True):
            answer = put_back.order_put_back(str(file), str(folder), content.fileno(), wanted, "x", "0")
            assert (answer["was_there"], answer["beside"], file.stat().st_mode) == (is_there, "", 0o100755)


def test_lock_of_a_shared_directory_keeps_no_file_from_being_put_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may lock /tmp, for ever."""
    monkeypatch.setattr(put_back, "_LOCK_EVERY_S", 0.0)
    file = written(folder, "log", "ab")
    wanted, held = Wanted(2, 0o100600, *USER[:2], 1_000_000_000), os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with open(file, "rb") as content:
            file.unlink()
            put_back.order_put_back(str(file), str(folder), content.fileno(), wanted, "x", "0")
    finally:
        os.close(held)
    assert file.read_text() == "ab"


def test_carried_file_of_another_user_that_has_not_changed_is_left_alone(folder: Path, image: Path) -> None:
    file = written(folder, "a", "0123", user_id=4712)
    (image / "carry-0").write_text("0123")
    done = settle(facts(file), data=Data(image, {str(file): "carry-0"}), carry=(str(folder),))
    assert (done.changed, file.stat().st_uid) == ([], 4712)


def test_file_in_a_directory_of_another_user_is_refused_and_not_made_by_root(folder: Path) -> None:
    file = written(folder, "train.log", "ab")
    described = facts(file)
    with kept(file) as data:
        file.unlink()
        os.chown(folder, 4712, 4712)
        with pytest.raises(Refused, match=f"{file} Permission denied"):
            settle(described, data=data)
    assert list(folder.iterdir()) == []


def test_directory_that_became_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    os.chown(inner, *USER[:2])
    file = written(inner, "train.log", "ab")
    described = facts(file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    foreign.chmod(0o777)
    with kept(file) as data:
        shutil.rmtree(inner)
        inner.symlink_to(foreign)
        with pytest.raises(Refused):
            settle(described, data=data)
    assert list(foreign.iterdir()) == []


def test_what_is_there_now_is_left_if_the_user_wants_that(folder: Path) -> None:
    replaced, shortened, gone, lost = (written(folder, name, "0123456789") for name in ("a", "b", "c", "d"))
    described = facts(replaced, shortened, gone, lost)
    with kept(replaced, shortened, gone) as data:
        replaced.unlink()
        written(folder, "a", "new")
        os.truncate(shortened, 1)
        gone.unlink()
        lost.unlink()
        done = settle(described, Policy.KEEP, data)
    assert [(Path(one.path).name, one.change, one.action) for one in done.changed] == [
        ("a", "replaced", "kept"),
        ("b", "shortened", "kept"),
        ("c", "deleted", "restored"),
        ("d", "deleted", "empty"),
    ]
    assert done.sizes == {str(replaced): 3, str(shortened): 1, str(lost): 0}
    assert [file.read_text() for file in (replaced, shortened, gone, lost)] == ["new", "0", "0123456789", ""]
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.chmod(0o600),
        lambda file: os.chown(file, 4712, 4712),
        replace_by_link,
    ],
)
def test_what_the_rank_could_not_have_open_is_not_left(folder: Path, change: Callable[[Path], object]) -> None:
    file = written(folder, "a", "0123456789")
    described = facts(file)
    file.unlink()
    written(folder, "a", "new")
    change(file)
    with pytest.raises(Refused, match="another type, owner, group or mode"):
        settle(described, Policy.KEEP)


def test_mapped_file_that_became_shorter_is_not_left(folder: Path) -> None:
    file = written(folder, "a", "0123456789")
    described = facts(file, rights="rw-s")
    os.truncate(file, 1)
    with pytest.raises(Refused, match="mapped"):
        settle(described, Policy.KEEP)


@pytest.mark.parametrize("policy", [Policy.RESTORE, Policy.KEEP])
def test_carried_file_that_has_changed_becomes_that_of_the_image_or_is_left(
    folder: Path, image: Path, policy: Policy
) -> None:
    files = [
        written(folder, name, "0123") for name in ("grown", "overwritten", "replaced", "shortened", "same", "gone")
    ]
    described = facts(*files)
    for index, file in enumerate(files):
        (image / f"carry-{index}").write_text(file.read_text())
    grown, overwritten, replaced, shortened, _, gone = files
    with kept(*files) as held:
        grown.write_text("012345")
        overwritten.write_text("abcd")
        replaced.unlink()
        written(folder, "replaced", "other")
        shortened.write_text("")
        gone.unlink()
        names = {str(file): f"carry-{index}" for index, file in enumerate(files)}
        done = settle(described, policy, Data(image, names, held.descriptors), (str(folder),))
    did = "restored" if policy is Policy.RESTORE else "kept"
    assert [(Path(one.path).name, one.change, one.action) for one in done.changed] == [
        ("grown", "grown", "cut-back"),
        ("overwritten", "overwritten", did),
        ("replaced", "replaced", did),
        ("shortened", "shortened", did),
        ("gone", "deleted", "restored"),
    ]
    assert not gone.exists(), "it is put into place with all others"
    texts = ["0123"] * 5 if policy is Policy.RESTORE else ["0123", "abcd", "other", "", "0123"]
    assert [file.read_text() for file in files[:5]] == texts
    assert done.left == (set() if policy is Policy.RESTORE else {str(file) for file in files[:5]})


class Sent:
    """Stands in for the image channel."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def put_open_file(self, name: str, fd: int) -> None:
        self.files[name] = os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.mark.parametrize(("size", "sent"), [(10, b"0123"), (4, b"0123"), (3, None), (0, None)])
async def test_small_file_that_changes_after_the_freeze_is_sent_as_it_was_or_not_at_all(
    folder: Path, size: int, sent: bytes | None
) -> None:
    file = written(folder, "small", "0123")
    with open(file, "rb") as opened:
        seen = os.fstat(opened.fileno())
        held = Held(f"/proc/self/fd/{opened.fileno()}", (seen.st_dev, seen.st_ino), True)
        os.truncate(file, size)
        channel: Any = Sent()
        await open_files.send_kept(channel, Small("kept-0", held, 4), USER)
    assert channel.files == ({} if sent is None else {"kept-0": sent})


async def test_small_file_whose_file_system_does_not_answer_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(held: Held, user: User) -> int:
        raise Timeout("the file system did not answer")

    monkeypatch.setattr(open_files, "open_held", hangs)
    channel: Any = Sent()
    await open_files.send_kept(channel, Small("kept-0", Held("/proc/self/fd/0", (0, 0), True), 4), USER)
    assert channel.files == {}


def test_descriptors_are_handed_over_in_batches(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waits for each answer."""
    names = [str(written(folder, f"file-{number}", "01")) for number in range(2 * BATCH + 1)]
    keep, asked = Holder.keep, list[int]()

    def counts(holder: Holder, key: str, blocks: Any, fds: Any) -> None:
        asked.append(len(fds))
        keep(holder, key, blocks, fds)

    monkeypatch.setattr(Holder, "keep", counts)
    program = "import sys; files = [open(name, 'r+') for name in sys.argv[1:]]; print('open', flush=True); input()"
    command = [sys.executable, "-c", program, *names]
    files = KeptFiles(tmp_path / "files.sock")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        described = tree_facts.gather([process.pid])
        files.keep("m-0000000000aa", [process.pid], described, [])
        process.communicate("\n")
    assert asked == [BATCH, BATCH, 1]
    handles = files.descriptors("m-0000000000aa")
    assert {os.readlink(f"/proc/self/fd/{handle}") for handle in handles.values()} == set(names)
    assert all(os.fstat(handle).st_ino == described.files[index].inode for index, handle in handles.items())
    for handle in handles.values():
        os.close(handle)
    files.drop("m-0000000000aa")
    files.close()


def test_descriptors_outlive_the_daemon_until_they_are_dropped(folder: Path, tmp_path: Path) -> None:
    """Of a process that really has the files open."""
    (folder / "carried").mkdir()
    file, small, carried = (written(folder, name, "01") for name in ("large", "small", "carried/file"))
    os.truncate(file, SMALL_BYTES + 1)
    program = "import sys; files = [open(name, 'r+') for name in sys.argv[1:]]; print('open', flush=True); input()"
    command = [sys.executable, "-c", program, str(file), str(small), str(carried)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        described = tree_facts.gather([process.pid])
        first = KeptFiles(tmp_path / "files.sock")
        copied = first.keep("m-0000000000aa", [process.pid], described, [str(carried.parent)])
        process.communicate("\n")
    names = {index: one.link for index, one in enumerate(described.files)}
    assert [names[int(one.name.removeprefix("kept-"))] for one in copied] == [str(small)]
    first.close()  # as a daemon that is killed
    file.unlink()
    small.unlink()
    second = KeptFiles(tmp_path / "files.sock")
    handles = second.descriptors("m-0000000000aa")
    assert {names[index]: os.fstat(handle).st_size for index, handle in handles.items()} == {
        str(file): SMALL_BYTES + 1,
        str(small): 2,
        str(carried): 2,
    }
    for handle in handles.values():
        os.close(handle)
    second.sweep(lambda move: True)
    handles = second.descriptors("m-0000000000aa")
    assert len(handles) == 3
    for handle in handles.values():
        os.close(handle)
    second.sweep(lambda move: False)
    assert second.descriptors("m-0000000000aa") == {}
    second.drop("m-0000000000aa")
    second.close()


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
