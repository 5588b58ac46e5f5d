"""A restored copy is compared with what its source described: files, mappings, credentials, rights."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from snapshotd.moves import record, tree_facts
from snapshotd.moves.target import comparison
from snapshotd.moves.tree_facts import File, MappedFile, TreeFacts
from snapshotd.proc import privileges
from tests.installation import readable_python

USER = 1500
#: Opens the files in its arguments, `w:PATH` for writing, and waits.
OPENS = """
import os, sys
for argument in sys.argv[1:]:
    how, _, path = argument.partition(":")
    os.open(path, {"r": os.O_RDONLY, "w": os.O_RDWR, "a": os.O_WRONLY | os.O_APPEND}[how])
print(flush=True)
sys.stdin.read()
"""


class Processes:
    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def facts(self, *files: str, user_id: int = 0) -> TreeFacts:
        """The facts about a new process that has these files open, as if it were process 1. Its mappings differ by chance."""
        process = subprocess.Popen(
            [readable_python(), "-I", "-S", "-c", OPENS, *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            user=user_id or None,
            group=user_id or None,
            extra_groups=[] if user_id else None,
            cwd="/",
        )
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        found = tree_facts.gather([process.pid])
        (one,) = found.processes
        mine = [msgspec.structs.replace(one, pid=1, mapped_files=[])]
        # as it arrives on the target
        return record.decode(record.encode(TreeFacts(found.files, mine)), TreeFacts)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.end()


@pytest.fixture
def folder(open_folder: Path) -> Path:
    for name in ("one", "two"):
        (open_folder / name).write_text("text")
        (open_folder / name).chmod(0o644)
    return open_folder


def differences(
    source: TreeFacts, copy: TreeFacts, other_names: dict[str, str] | None = None, carry_paths: Sequence[str] = ()
) -> list[str]:
    return comparison.differences(source, copy, other_names=other_names or {}, carry_paths=carry_paths)


def test_equal_processes_do_not_differ(processes: Processes, folder: Path) -> None:
    files = (f"r:{folder}/one", f"w:{folder}/two", f"a:{folder}/two", "r:/dev/null", "r:/proc/self/status")
    assert differences(processes.facts(*files[:4]), processes.facts(*files[:4])) == []


def test_other_file_under_the_same_path_is_found(processes: Processes, folder: Path) -> None:
    source = processes.facts(f"w:{folder}/one")
    (folder / "one").rename(folder / "aside")
    (folder / "one").symlink_to(folder / "two")
    (found,) = differences(source, processes.facts(f"w:{folder}/one"))
    assert f"descriptor 3 ({folder}/one) is {folder}/two" in found


@pytest.mark.root
def test_other_owner_group_and_mode_are_found(processes: Processes, folder: Path) -> None:
    source = processes.facts(f"w:{folder}/one")
    for user, group, mode, said in (
        (USER, 0, 0o644, "belongs to user 1500 and group 0, on the source to 0 and 0"),
        (0, USER, 0o644, "belongs to user 0 and group 1500"),
        (0, 0, 0o666, "has mode 100666, on the source 100644"),
    ):
        os.chown(folder / "one", user, group)
        (folder / "one").chmod(mode)
        (found,) = differences(source, processes.facts(f"w:{folder}/one"))
        assert said in found


def test_set_uid_bits_of_a_carried_file_are_not_missed(processes: Processes, folder: Path) -> None:
    (folder / "one").chmod(0o4755)
    source = processes.facts(f"r:{folder}/one")
    (folder / "one").chmod(0o755)
    copy = processes.facts(f"r:{folder}/one")
    assert "has mode" in differences(source, copy)[0]
    assert differences(source, copy, carry_paths=[str(folder)]) == []


def test_other_flags_and_missing_and_additional_descriptors_are_found(processes: Processes, folder: Path) -> None:
    one = f"{folder}/one"
    (found,) = differences(processes.facts(f"r:{one}"), processes.facts(f"w:{one}"))
    assert "has the flags" in found
    (found,) = differences(processes.facts(f"w:{one}", f"r:{one}"), processes.facts(f"w:{one}"))
    assert f"descriptor 4 ({one}) was not restored" in found
    (found,) = differences(processes.facts(), processes.facts(f"w:{one}"))
    assert f"descriptor 3 ({one}) is not open on the source" in found


def test_content_counts_where_the_rank_only_reads(processes: Processes, folder: Path) -> None:
    reads, writes = processes.facts(f"r:{folder}/one"), processes.facts(f"w:{folder}/one")
    (folder / "new").write_text("othertext")
    (folder / "new").chmod(0o644)
    (folder / "new").rename(folder / "one")
    (found,) = differences(reads, processes.facts(f"r:{folder}/one"))
    assert "has another size, time and content" in found
    assert differences(writes, processes.facts(f"w:{folder}/one")) == []


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_put_into_the_place_of_a_file_meanwhile_is_not_opened(
    processes: Processes, folder: Path, kind: str
) -> None:
    """Opening a device may have an effect by itself, and the daemon opens with root's rights."""
    (folder / "users").mkdir()
    (folder / "users/one").write_text("text")
    (folder / "roots").mkdir()
    copy = processes.facts(f"r:{folder}/users/one")
    source = msgspec.structs.replace(
        copy, files=[msgspec.structs.replace(file, digest="00", mtime_ns=1, inode=1) for file in copy.files]
    )
    if kind == "link":
        (folder / "users").rename(folder / "aside")
        (folder / "users").symlink_to("roots")
        (folder / "roots/one").write_text("text")
    else:
        (folder / "users/one").unlink()
        os.mkfifo(folder / "users/one")
    opened = OpenWatch(folder / "users/one")
    (found,) = differences(source, copy)
    assert "has another size, time and content" in found
    assert not opened.seen()


class OpenWatch:
    """Whether a file is opened, as inotify tells."""

    _IN_OPEN = 0x20

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._events, os.fsencode(path), self._IN_OPEN) >= 0

    def seen(self) -> bool:
        try:
            return bool(os.read(self._events, 4096))
        except BlockingIOError:
            return False
        finally:
            os.close(self._events)


def test_unlinked_file_is_one_on_both_nodes(processes: Processes, folder: Path) -> None:
    source = processes.facts(f"w:{folder}/one")
    gone = [msgspec.structs.replace(file, link=f"{file.link} (deleted)", kind="GHOST") for file in source.files]
    ghost = TreeFacts(
        [new if old.link.startswith(str(folder)) else old for new, old in zip(gone, source.files, strict=True)],
        source.processes,
    )
    assert differences(ghost, ghost) == []
    (found,) = differences(ghost, source)
    assert f"is {folder}/one" in found
    lost = {"GHOST": "NAMELESS"}
    nameless = [msgspec.structs.replace(file, kind=lost.get(file.kind, file.kind)) for file in ghost.files]
    named = TreeFacts(nameless, source.processes)
    assert differences(named, source, {f"{folder}/one": f"{folder}/one"}) == []


def test_processes_that_are_missing_or_additional_are_found(processes: Processes) -> None:
    source = processes.facts()
    nothing = TreeFacts([], [])
    assert differences(source, nothing) == ["process 1 was not restored"]
    assert differences(nothing, source) == ["process 1 was not described by the source"]


@pytest.mark.root
def test_other_credentials_are_found(processes: Processes) -> None:
    found = differences(processes.facts(user_id=USER), processes.facts())
    assert any("user ids are (0, 0, 0, 0), on the source (1500, 1500, 1500, 1500)" in one for one in found)
    assert any("effective" in one for one in found)


# ---------------------------------------------------------------- mappings

LIBRARY = File("/lib/one.so", "FILE", 0o100644, 0, 0, 0, 5, 4096, 1)
OTHER = File("/lib/two.so", "FILE", 0o100644, 0, 0, 0, 6, 4096, 1)
BASE = TreeFacts([LIBRARY, OTHER], [])


def mapped(*mappings: tuple[int, int, int, str, int]) -> TreeFacts:
    who = privileges.read(os.getpid())
    process = tree_facts.ProcessFacts(1, who, {}, "/", "/", "/bin/one", [], [MappedFile(*one) for one in mappings])
    return TreeFacts(BASE.files, [process])


WHOLE = mapped((0x1000, 0x4000, 0, "r-xp", 0))


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        (mapped((0x1000, 0x2000, 0, "r-xp", 0), (0x2000, 0x4000, 0x1000, "r-xp", 0)), ""),
        (mapped((0x1000, 0x4000, 0, "r-xp", 1)), "is /lib/two.so"),
        (mapped((0x1000, 0x4000, 0x1000, "r-xp", 0)), "shows another part"),
        (mapped((0x1000, 0x4000, 0, "rwxp", 0)), "has the rights rwxp, on the source r-xp"),
        (mapped((0x1000, 0x3000, 0, "r-xp", 0)), "was not restored"),
        (mapped((0x1000, 0x5000, 0, "r-xp", 0)), "at 4000 is not on the source"),
        (mapped((0x1000, 0x4000, 0, "r-xp", 0), (0x8000, 0x9000, 0, "r-xp", 1)), "is not on the source"),
        (mapped(), "was not restored"),
    ],
)
def test_mappings_are_compared_however_the_kernel_splits_them(copy: TreeFacts, said: str) -> None:
    found = differences(WHOLE, copy)
    assert [said in one for one in found] == ([True] if said else [])
    if not said:
        assert differences(copy, WHOLE) == []


# ---------------------------------------------------------------- rights


@pytest.mark.root
def test_files_that_the_user_could_not_open_are_found(processes: Processes, folder: Path) -> None:
    """The process got them from root, as from a criu that opens every path of an image."""
    secret, own = folder / "one", folder / "two"
    secret.chmod(0o640)
    own.chmod(0o400)
    os.chown(own, USER, USER)
    as_root = processes.facts(f"w:{secret}", f"r:{secret}", f"w:{own}", "r:/etc/passwd", "w:/etc/passwd", "w:/dev/null")
    (process,) = as_root.processes
    who = processes.facts(user_id=USER).processes[0].credentials
    user = TreeFacts(as_root.files, [msgspec.structs.replace(process, credentials=who)])
    found = comparison.beyond_rights(user)
    assert sorted(one.partition(": ")[2] for one in found) == [
        "its user may not open /etc/passwd for writing",
        f"its user may not open {secret} for writing",
    ]
    assert comparison.beyond_rights(as_root) == []
    folder.chmod(0o700)
    assert any(f"cannot reach {secret}" in one for one in comparison.beyond_rights(user))


@pytest.mark.root
def test_only_links_of_root_are_followed(tmp_path: Path) -> None:
    """The directories above are root's and not open to others, unlike /tmp."""
    with_links = Path("/var/lib") / f"migrator-test-{os.getpid()}"
    (with_links / "real").mkdir(parents=True)
    try:
        (with_links / "data").symlink_to("real")
        assert comparison.through_root_links(f"{with_links}/data/file") == f"{with_links}/real/file"
        os.chown(with_links / "data", USER, USER, follow_symlinks=False)
        assert comparison.through_root_links(f"{with_links}/data/file") == f"{with_links}/data/file"
        os.chown(with_links / "data", 0, 0, follow_symlinks=False)
        with_links.chmod(0o777)
        assert comparison.through_root_links(f"{with_links}/data/file") == f"{with_links}/data/file"
    finally:
        (with_links / "data").unlink()
        (with_links / "real").rmdir()
        with_links.rmdir()
