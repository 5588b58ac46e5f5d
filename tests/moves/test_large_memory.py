"""Large memory is found, read by several threads at once, and stored in the order of its addresses."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.errors import RankGone, SnapshotError
from snapshotd.criu import page_ranges
from snapshotd.criu.below import MAX_ROUNDS, Layer
from snapshotd.criu.page_ranges import Range
from snapshotd.moves.source import large_memory, process_memory
from snapshotd.moves.source.large_memory import LEAST_BYTES, LEAST_RUN_BYTES, LargeMemory
from snapshotd.moves.source.process_memory import ProcessMemory
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.store import ImageStore
from tests.kernel import needs_page_scans

MOVE = "m-0123456789ab"
CHUNK_BYTES = 64 << 10
MIB = 1 << 20

RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=12)


@given(RUNS, st.integers(1, 16))
def test_chunks_have_every_page_once_and_in_order(runs: list[tuple[int, int]], chunk_pages: int) -> None:
    ranges: list[Range] = []
    at = 0
    for gap, length in runs:
        ranges.append(((at + gap) * PAGE_BYTES, (at + gap + length) * PAGE_BYTES))
        at += gap + length
    chunks = list(process_memory.chunks(ranges, chunk_pages * PAGE_BYTES))
    assert page_ranges.joined(part for _, parts in chunks for part in parts) == ranges
    expected = 0
    for offset, parts in chunks:
        assert offset == expected
        assert parts == sorted(parts)
        expected += page_ranges.size_bytes(parts)
    assert expected == page_ranges.size_bytes(ranges)
    assert all(page_ranges.size_bytes(parts) == chunk_pages * PAGE_BYTES for _, parts in chunks[:-1])


class Memory:
    """A mapping of this test's own process."""

    def __init__(self, size_bytes: int, kind: int = mmap.MAP_PRIVATE, rights: int = 0) -> None:
        rights = rights or mmap.PROT_READ | mmap.PROT_WRITE
        self.view = mmap.mmap(-1, size_bytes, flags=kind | mmap.MAP_ANONYMOUS, prot=rights)
        self.view.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise the kernel may fill the gaps
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.end = self.start + size_bytes

    def has(self, ranges: Iterable[Range]) -> list[Range]:
        """Where those of the ranges that lie in it begin and end here."""
        return [
            (start - self.start, end - self.start)
            for start, end in page_ranges.common(page_ranges.joined(ranges), [(self.start, self.end)])
        ]


@needs_page_scans
@pytest.mark.root
def test_only_long_runs_of_ordinary_private_pages_are_sent_beside_criu() -> None:
    large = Memory(2 * LEAST_BYTES)
    large.view[:] = os.urandom(2 * LEAST_BYTES)
    large.view.madvise(mmap.MADV_DONTNEED, MIB, LEAST_RUN_BYTES)
    executable = Memory(LEAST_BYTES, rights=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    shared, scattered = Memory(LEAST_BYTES, mmap.MAP_SHARED), Memory(LEAST_BYTES)
    for one in (executable, shared):
        one.view[:] = b"x" * LEAST_BYTES
    for at in range(0, LEAST_BYTES, 2 * PAGE_BYTES):
        scattered.view[at] = 1
    (found,) = large_memory.find([os.getpid()])
    assert (found.layer.pid, found.layer.parent) == (os.getpid(), None)
    assert page_ranges.joined(part for parts in found.layer.rounds for part in parts) == found.layer.pages
    assert large.has(found.layer.pages) == [(0, MIB), (MIB + LEAST_RUN_BYTES, 2 * LEAST_BYTES)]
    for one in (executable, shared, scattered):
        assert one.has(found.layer.pages) == []
    mine = os.getpid()
    first = [(large.start, large.start + MIB)]
    assert large_memory.find([mine], without={mine}) == []
    assert large_memory.find([mine], [Layer(mine, [], parent=1)]) == [], (
        "all its own pages may lie below one image only"
    )
    (less,) = large_memory.find([mine], [Layer(99, first, parent=mine), Layer(98, [(large.end, 2**47)], parent=7)])
    assert large.has(less.layer.pages) == [(MIB + LEAST_RUN_BYTES, 2 * LEAST_BYTES)], (
        "what a child shares is left to criu"
    )
    assert large_memory.find([2**22 - 1]) == [], "it has ended"


def sent(memory: LargeMemory, folder: Path) -> bytes:
    """What the target has of it."""
    store = ImageStore(folder, on_disk=True)
    store.create(MOVE, 1 << 30)

    async def send() -> None:
        async with Sender([LocalStream(store, MOVE) for _ in range(3)], CHUNK_BYTES) as sender:
            await large_memory.send(sender, [memory])
            assert store.seal(MOVE, await sender.finish()) == []
            assert sender.peak_chunks_held <= 6

    asyncio.run(send())
    return b"".join((store.path(MOVE) / name).read_bytes() for name in memory.files)


@pytest.fixture
def child() -> Iterator[tuple[int, Memory, bytes]]:
    """A process with memory of which some pages are zero, and some without access; and that content."""
    waiting, ready = os.pipe()
    libc = ctypes.CDLL(None)
    content = bytearray(os.urandom(40 * CHUNK_BYTES))
    content[3 * CHUNK_BYTES : 5 * CHUNK_BYTES + PAGE_BYTES] = bytes(2 * CHUNK_BYTES + PAGE_BYTES)
    memory = Memory(len(content))
    memory.view[:] = bytes(content)
    hidden = (ctypes.c_void_p(memory.start + 7 * CHUNK_BYTES), ctypes.c_size_t(3 * PAGE_BYTES))
    if (pid := os.fork()) == 0:
        libc.mprotect(*hidden, 0)
        os.write(ready, b"!")
        signal.pause()
        os._exit(0)
    assert os.read(waiting, 1) == b"!"
    yield pid, memory, bytes(content)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(waiting)
    os.close(ready)


@pytest.mark.root
@pytest.mark.parametrize("readers", [1, 5])
def test_memory_of_a_process_arrives_in_the_order_of_its_addresses(
    child: tuple[int, Memory, bytes], readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, memory, content = child
    monkeypatch.setattr(large_memory, "readers", lambda: readers)
    parts = [(0, 9 * PAGE_BYTES), (20 * PAGE_BYTES, 21 * PAGE_BYTES), (2 * CHUNK_BYTES, len(content) - PAGE_BYTES)]
    runs = [(memory.start + start, memory.start + end) for start, end in parts]
    found = sent(LargeMemory(pid, Layer(77, runs, rounds=[runs])), tmp_path / "1")
    assert found == b"".join(content[start:end] for start, end in parts)
    several = [[run] for run in runs]
    assert sent(LargeMemory(pid, Layer(77, runs, rounds=several)), tmp_path / "3") == found


def test_memory_in_many_pieces_is_in_fewer_files() -> None:
    """The list of each file has the pieces of those before it, and the target reads all of them while the rank waits."""
    size = 8 * large_memory.MOST_FILES * LEAST_RUN_BYTES
    for count, files in ((100, large_memory.MOST_FILES), (20_000, 2), (60_000, 1)):
        runs = [(number * 2 * size, (number * 2 + 1) * size) for number in range(count)]
        assert len(large_memory._divided(runs)) == files


@given(RUNS.filter(bool), st.integers(1, 9))
def test_files_divide_the_memory(runs: list[tuple[int, int]], least_pages: int) -> None:
    ranges: list[Range] = []
    at = 0
    for gap, length in runs:
        ranges.append(((at + gap) * PAGE_BYTES, (at + gap + length) * PAGE_BYTES))
        at += gap + length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_memory, "LEAST_FILE_BYTES", least_pages * PAGE_BYTES)
        files = large_memory._divided(ranges)
    assert page_ranges.joined(part for parts in files for part in parts) == ranges
    sizes = [page_ranges.size_bytes(parts) for parts in files]
    assert sum(sizes) == page_ranges.size_bytes(ranges), "no page is in two files"
    assert len(files) <= large_memory.MOST_FILES < MAX_ROUNDS
    assert min(sizes[:-1], default=least_pages * PAGE_BYTES) >= least_pages * PAGE_BYTES
    assert all(size == sizes[0] for size in sizes[:-1])


@pytest.mark.root
def test_process_that_ends_meanwhile_fails_the_dump(child: tuple[int, Memory, bytes], tmp_path: Path) -> None:
    pid, memory, _ = child
    runs = [(memory.start, memory.end)]
    beyond = [*runs, (1 << 20, 2 << 20)]
    with pytest.raises(ExceptionGroup) as failed:
        sent(LargeMemory(pid, Layer(77, beyond, rounds=[beyond])), tmp_path)
    assert failed.group_contains(SnapshotError, match=f"process {pid} cannot be read"), "nothing is at that address"
    with pytest.raises(RankGone, match="has ended"):
        sent(LargeMemory(2**22 - 1, Layer(77, runs, rounds=[runs])), tmp_path / "gone")


@pytest.mark.root
def test_process_that_has_ended_when_all_was_read_fails_the_dump(
    child: tuple[int, Memory, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, memory, _ = child
    runs = [(memory.start, memory.end)]

    must_live = ProcessMemory.must_live

    def end_and_look(memory: ProcessMemory) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        must_live(memory)

    monkeypatch.setattr(ProcessMemory, "must_live", end_and_look)
    with pytest.raises(RankGone, match=f"process {pid} has ended"):
        sent(LargeMemory(pid, Layer(77, runs, rounds=[runs])), tmp_path)


@pytest.mark.root
def test_reading_leaves_pages_shared(child: tuple[int, Memory, bytes]) -> None:
    """Else the rank would need the memory of all its processes while it waits, and after a move that was undone."""
    pid, memory, content = child

    def shared_bytes() -> int:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(size) << 10 for size in re.findall(r"^Shared_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE))

    before, found = shared_bytes(), bytearray(len(content))
    assert before > len(content)
    with ProcessMemory(pid) as reading:
        reading.fill([(memory.start, memory.end)], memoryview(found))
    assert found == content
    assert shared_bytes() > before - MIB
