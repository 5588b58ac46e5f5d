"""Pages of an image get into stopped processes: all of them, nothing else, and no child outlives that."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import CriuFailed, Where
from snapshotd.criu.pagemap_image import PAGE_BYTES, Piece
from snapshotd.criu.placed import PlacedPages
from snapshotd.moves import page_copy
from snapshotd.moves.page_copy_child import CHUNK_BYTES
from snapshotd.moves.target import placing
from snapshotd.moves.target.placing import Placing
from snapshotd.proc import privileges
from snapshotd.proc.files import read_text
from snapshotd.runtime import child_process, faults
from snapshotd.runtime.child_process import ChildProcess
from snapshotd.sandbox import syscalls
from tests.moves.test_twin_attacks import NOBODY, SILENT, USER, copiers
from tests.moves.twinned import until

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE_BYTES = 16 * MIB
INNER = 7
#: What of a file of pages is no hole, in pages.
DATA = [(0, 300), (301, 302), (1000, SIZE_BYTES // PAGE_BYTES)]
libc = ctypes.CDLL(None, use_errno=True)


class Stopped:
    """A stopped process of a user that has an empty mapping, of which it may not write or use the second half."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise the kernel may fill the gaps
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pid = os.fork()
        if not self.pid:
            try:
                for part, rights in ((2, mmap.PROT_READ), (3, 0)):
                    where = ctypes.c_void_p(self.start + part * SIZE_BYTES // 4)
                    libc.mprotect(where, ctypes.c_size_t(SIZE_BYTES // 4), rights)
                os.setgroups([])
                os.setresgid(USER, USER, USER)
                os.setresuid(USER, USER, USER)
                os.kill(os.getpid(), signal.SIGSTOP)
            finally:
                os._exit(1)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def pages(self) -> set[int]:
        """The numbers of those that it has."""
        with open(f"/proc/{self.pid}/pagemap", "rb", buffering=0) as file:
            entries = os.pread(file.fileno(), SIZE_BYTES // PAGE_BYTES * 8, self.start // PAGE_BYTES * 8)
        return {number for number, entry in enumerate(memoryview(entries).cast("Q")) if entry >> 62}

    def content(self) -> bytes:
        """Afterwards it has pages that only exist because they were read."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), SIZE_BYTES, self.start)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert copiers() == []


@pytest.fixture
def process() -> Iterator[Stopped]:
    made = Stopped()
    yield made
    made.end()


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, as images are."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def put(path: Path) -> bytes:
    """Makes a file with data and holes; returns its content."""
    content = bytearray(SIZE_BYTES)
    with path.open("wb", buffering=0) as file:
        file.truncate(SIZE_BYTES)
        for first, last in DATA:
            data = os.urandom((last - first) * PAGE_BYTES)
            content[first * PAGE_BYTES : last * PAGE_BYTES] = data
            assert os.pwrite(file.fileno(), data, first * PAGE_BYTES) == len(data)
    return bytes(content)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """The children that were started."""
    children: list[ChildProcess] = []
    start = child_process.start

    def one_more(module: str) -> ChildProcess:
        children.append(start(module))
        return children[-1]

    monkeypatch.setattr(child_process, "start", one_more)
    return children


def at(process: Stopped, pieces: list[Piece]) -> list[Piece]:
    return [(offset, process.start + address, length) for offset, address, length in pieces]


async def place(folder: Path, placed: list[PlacedPages], pids: dict[int, int], *, keeps_pages: bool = True) -> None:
    made = Placing(folder, placed, keeps_pages=keeps_pages)
    async with made.ready():
        await made.run(lambda: pids)
    assert copiers() == []


async def failure(folder: Path, placed: list[PlacedPages], pids: dict[int, int]) -> str:
    with pytest.raises(CriuFailed) as caught:
        await place(folder, placed, pids)
    assert copiers() == []
    assert caught.value.where is Where.SOURCE_FROZEN
    assert caught.value.message.startswith("the memory of the copy cannot be restored: ")
    return caught.value.message


# ---------------------------------------------------------------------- what is placed

#: Pieces, and how many pages of the file remain if it gives up what was placed: those that no request has as a whole.
LAYOUTS: dict[str, tuple[list[Piece], int]] = {
    "all of it": ([(0, 0, SIZE_BYTES)], 0),
    "pages": ([(PAGE_BYTES, 9 * PAGE_BYTES, 77 * PAGE_BYTES), (8 * MIB, 8 * MIB, 2 * MIB)], -1),
    "all but 32 bytes": (
        [(0, 0, 5 * PAGE_BYTES + 100), (5 * PAGE_BYTES + 132, 5 * PAGE_BYTES + 132, SIZE_BYTES - 5 * PAGE_BYTES - 132)],
        1 + SIZE_BYTES // CHUNK_BYTES,
    ),
    "odd lengths at odd addresses": (
        [(7, 3, 4097), (2 * PAGE_BYTES, 10 * PAGE_BYTES - 1, 5 * MIB + 1), (SIZE_BYTES - 9, SIZE_BYTES - 19, 9)],
        -1,
    ),
}


def with_data(pieces: list[Piece]) -> set[int]:
    """The pages of the memory into which something of the file belongs that is no hole."""
    found: set[int] = set()
    for offset, address, length in pieces:
        for first, last in DATA:
            start, end = max(offset, first * PAGE_BYTES), min(offset + length, last * PAGE_BYTES)
            if start < end:
                moved = address - offset
                found.update(range((start + moved) // PAGE_BYTES, (end - 1 + moved) // PAGE_BYTES + 1))
    return found


@pytest.mark.parametrize(("keeps_pages", "writers"), [(True, 3), (False, 1), (False, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_pages_are_placed_and_holes_are_not(
    process: Stopped,
    folder: Path,
    started: list[ChildProcess],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    keeps_pages: bool,
    writers: int,
) -> None:
    pieces, remaining = LAYOUTS[layout]
    placed = PlacedPages(INNER, "pages", at(process, pieces))
    monkeypatch.setattr(placing, "BYTES_PER_WRITER", -(-placed.bytes // writers))
    monkeypatch.setattr(os, "cpu_count", lambda: writers)
    content = put(folder / "pages")
    before = (folder / "pages").stat().st_blocks
    await place(folder, [placed], {INNER: process.pid}, keeps_pages=keeps_pages)
    assert len(started) == writers

    assert process.pages() == with_data(pieces)
    memory, file = bytearray(SIZE_BYTES), bytearray(content)
    for offset, address, length in pieces:
        memory[address : address + length] = content[offset : offset + length]
        if not keeps_pages:
            file[offset : offset + length] = bytes(length)
    assert process.content() == memory
    assert (folder / "pages").read_bytes() == file, "only what was placed is given up"
    after = (folder / "pages").stat().st_blocks
    if keeps_pages:
        assert after == before
    elif remaining >= 0:
        assert after * 512 <= remaining * PAGE_BYTES
    else:
        assert after < before


@pytest.mark.parametrize("writers", [1, 3, 8])
async def test_each_process_gets_its_pages_from_its_files(
    process: Stopped, folder: Path, monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    monkeypatch.setattr(placing, "BYTES_PER_WRITER", MIB)
    monkeypatch.setattr(os, "cpu_count", lambda: writers)
    other = Stopped()
    try:
        old, new, theirs = (put(folder / name) for name in ("old", "new", "theirs"))
        placed = [
            PlacedPages(INNER, "new", at(process, [(0, 0, MIB), (4 * MIB, 8 * MIB, MIB)])),
            PlacedPages(INNER, "old", at(process, [(6 * MIB, MIB, 7 * MIB)])),
            PlacedPages(INNER, "old", []),
            PlacedPages(8, "theirs", at(other, [(0, 0, SIZE_BYTES)])),
        ]
        await place(folder, placed, {INNER: process.pid, 8: other.pid, 9: os.getpid()}, keeps_pages=False)
        expected = new[:MIB] + old[6 * MIB : 13 * MIB] + new[4 * MIB : 5 * MIB] + bytes(7 * MIB)
        assert process.content() == expected
        assert other.content() == theirs
    finally:
        other.end()


@pytest.mark.parametrize(
    ("bytes_per_writer", "cpus", "children"), [(64 * MIB, 16, 1), (4 * MIB - 1, 16, 5), (MIB, 16, 8), (MIB, 2, 2)]
)
async def test_more_children_place_more_pages(
    process: Stopped,
    folder: Path,
    started: list[ChildProcess],
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_writer: int,
    cpus: int,
    children: int,
) -> None:
    monkeypatch.setattr(placing, "BYTES_PER_WRITER", bytes_per_writer)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    content = put(folder / "pages")
    await place(folder, [PlacedPages(INNER, "pages", at(process, [(0, 0, SIZE_BYTES)]))], {INNER: process.pid})
    assert process.content() == content
    assert len(started) == children


async def test_nothing_needs_no_child(folder: Path, started: list[ChildProcess]) -> None:
    await place(folder, [], {})
    assert started == []


# ---------------------------------------------------------------------- what cannot be placed


def whole(process: Stopped) -> PlacedPages:
    return PlacedPages(INNER, "pages", at(process, [(0, 0, SIZE_BYTES)]))


def ends(process: Stopped, *, reaped: bool) -> None:
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))


def becomes_a_link(folder: Path) -> None:
    (folder / "pages").rename(folder / "other")
    (folder / "pages").symlink_to("other")


def placed_beside(process: Stopped, _folder: Path) -> PlacedPages:
    """The first MiB of the mapping, and a page that nothing can be mapped at."""
    return PlacedPages(INNER, "pages", [*at(process, [(0, 0, MIB)]), (MIB, 0, PAGE_BYTES)])


def must_act(act: Callable[[Stopped, Path], object]) -> Callable[[Stopped, Path], PlacedPages]:
    def acted(process: Stopped, folder: Path) -> PlacedPages:
        act(process, folder)
        return whole(process)

    return acted


IMPOSSIBLE: dict[str, tuple[Callable[[Stopped, Path], PlacedPages], str]] = {
    "a process that has ended": (must_act(lambda process, _: ends(process, reaped=False)), "has ended|No such process"),
    "one whose pid is free again": (must_act(lambda process, _: ends(process, reaped=True)), "No such file"),
    "a process that was not restored": (
        lambda process, _: PlacedPages(8, "pages", whole(process).pieces),
        "it has no process 8",
    ),
    "an address at which nothing is mapped": (placed_beside, "Input/output error"),
    "a file that is not there": (must_act(lambda _, folder: (folder / "pages").unlink()), "No such file"),
    "a link": (must_act(lambda _, folder: becomes_a_link(folder)), "symbolic links"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
async def test_what_cannot_be_placed_fails_the_restore(process: Stopped, folder: Path, case: str) -> None:
    put(folder / "pages")
    prepare, expected = IMPOSSIBLE[case]
    assert re.search(expected, await failure(folder, [prepare(process, folder)], {INNER: process.pid}))


@pytest.fixture
def after_an_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[ChildProcess], object]]]:
    """What is done when a child has copied its first pieces, and has further ones to copy."""
    actions: list[Callable[[ChildProcess], object]] = []
    check = page_copy.PageCopy._check

    def checked(copy: page_copy.PageCopy, child: ChildProcess, answer: bytes) -> None:
        check(copy, child, answer)
        while actions:
            actions.pop()(child)

    monkeypatch.setattr(page_copy.PageCopy, "_check", checked)
    yield actions
    assert actions == []


@pytest.mark.parametrize("files", [1, 4])
async def test_child_that_is_killed_fails_the_restore(
    process: Stopped,
    folder: Path,
    after_an_answer: list[Callable[[ChildProcess], object]],
    monkeypatch: pytest.MonkeyPatch,
    files: int,
) -> None:
    """Also if the others could copy what is left, of this file and of others."""
    monkeypatch.setattr(page_copy, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(placing, "BYTES_PER_WRITER", SIZE_BYTES // files)
    monkeypatch.setattr(os, "cpu_count", lambda: files)
    size = SIZE_BYTES // files
    placed = [PlacedPages(INNER, f"pages-{n}", at(process, [(n * size, n * size, size)])) for n in range(files)]
    for one in placed:
        put(folder / one.file)
    after_an_answer.append(ChildProcess.kill)
    text = await failure(folder, placed, {INNER: process.pid})
    assert "the child that copies the memory of the restored copy has ended" in text
    assert process.pages()


async def test_process_that_has_got_the_pid_meanwhile_is_not_written(process: Stopped, folder: Path) -> None:
    """The one of the copy was killed, and its pid given to another before its memory was opened."""
    put(folder / "pages")
    lookups = iter([{INNER: process.pid}, {}])
    made = Placing(folder, [whole(process)], keeps_pages=True)
    with pytest.raises(CriuFailed, match=f"process {INNER} of it has ended"):
        async with made.ready():
            await made.run(lambda: next(lookups))
    assert process.pages() == set()


async def test_process_that_ends_meanwhile_fails_the_restore(
    process: Stopped, folder: Path, after_an_answer: list[Callable[[ChildProcess], object]]
) -> None:
    put(folder / "pages")
    after_an_answer.append(lambda _: ends(process, reaped=False))
    text = await failure(folder, [whole(process)], {INNER: process.pid})
    assert text.endswith(": the memory of the restored copy has ended")


@pytest.mark.parametrize("at_once", [True, False])
async def test_child_that_is_killed_while_it_starts_fails_the_restore(
    process: Stopped, folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """`at_once`: it has ended before it could get its descriptors."""
    put(folder / "pages")
    start = child_process.start

    def killed(module: str) -> ChildProcess:
        child = start(module)
        child.process.kill()
        if at_once:
            child.process.wait()
        return child

    monkeypatch.setattr(child_process, "start", killed)
    assert "has ended" in await failure(folder, [whole(process)], {INNER: process.pid})
    assert process.pages() == set()


async def test_placing_that_fails_fails_the_restore(
    process: Stopped, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder / "pages")
    monkeypatch.setattr(faults, "_folder", folder)
    (folder / "fault").write_text("placing fail")
    assert "fault injected at placing" in await failure(folder, [whole(process)], {INNER: process.pid})
    assert process.pages() == set()
    await place(folder, [whole(process)], {INNER: process.pid})


# ---------------------------------------------------------------------- a page that never arrives


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A process, and the address at which it maps a file of a FUSE server that never answers."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse, for a FUSE server that never answers")
    monkeypatch.setattr(child_process, "REAP_S", 0.1)  # one that waits for the server ends with it
    words = [sys.executable, "-I", "-S", str(SILENT), str(tmp_path), "file"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    yield server.pid, int(server.stdout.readline())
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    until(lambda: not copiers())


def writes(pid: int) -> bool:
    """Whether it waits in a system call that writes at an offset."""
    return read_text(f"/proc/{pid}/syscall").split()[0] == str(syscalls.number("pwrite64", os.uname().machine))


@pytest.fixture
def hanging(silent: tuple[int, int], folder: Path) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Places a page at that address."""
    pid, address = silent
    content = put(folder / "pages")
    made = Placing(folder, [PlacedPages(INNER, "pages", [(0, address, PAGE_BYTES)])], keeps_pages=False)

    async def run() -> None:
        async with made.ready():
            await made.run(lambda: {INNER: pid})

    yield run
    assert (folder / "pages").read_bytes() == content, "what was not placed is not given up"


async def test_page_that_never_arrives_hangs_no_more_than_a_child(
    hanging: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    running = asyncio.create_task(hanging())
    await asyncio.to_thread(until, lambda: any(map(writes, copiers())))
    (child,) = map(privileges.read, copiers())
    assert (child.all_user_ids, child.capabilities, child.no_new_privs) == (frozenset([NOBODY]), 0, True)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_page_that_does_not_arrive_in_time_fails_the_restore(
    hanging: Callable[[], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copy, "LIMIT_S", 2.0)
    with pytest.raises(CriuFailed, match="the memory of the restored copy did not answer within 2 s"):
        await asyncio.wait_for(hanging(), 20)
