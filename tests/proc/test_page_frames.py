"""Which pages forked processes share, found by their page frames."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from snapshotd.criu import below, page_ranges
from snapshotd.criu.below import Layer
from snapshotd.criu.page_ranges import Ranges
from snapshotd.moves.source import fork_sharing
from snapshotd.moves.source.fork_sharing import ForkSharing
from snapshotd.proc.page_frames import PAGE_BYTES, Frames, NotSupported, PageFrames, private_mappings, unchanged
from tests.kernel import needs_page_scans

pytestmark = needs_page_scans

PRESENT = 1 << 63
MIB = 1 << 20


def entries(*words: int) -> bytearray:
    return bytearray(struct.pack(f"={len(words)}Q", *words))


def pages(first: int, last: int) -> page_ranges.Range:
    return first * PAGE_BYTES, last * PAGE_BYTES


def test_pages_with_the_same_frame_are_found() -> None:
    frames = Frames(
        [pages(10, 13), pages(20, 22)],
        entries(PRESENT | 5, PRESENT | 6, PRESENT | 7, 8, PRESENT | 1 << 40),
        [pages(10, 13), pages(20, 22)],
    )
    others = entries(PRESENT | 5, PRESENT | 6, PRESENT | 9, 8, PRESENT | 1 << 40)
    assert frames.same(others) == [pages(10, 12), pages(21, 22)], "a page that is not in memory has no frame"
    assert Frames([], bytearray(), []).same(bytearray()) == []


def test_same_pages_at_the_border_of_two_spans_are_two_ranges() -> None:
    spans, numbers = [pages(10, 12), pages(20, 22)], entries(*(PRESENT | number for number in (1, 2, 3, 4)))
    assert Frames(spans, numbers, spans).same(numbers) == spans


def test_only_wanted_pages_are_compared() -> None:
    numbers = entries(*(PRESENT | number for number in range(1, 11)))
    wanted = [pages(11, 12), pages(14, 16), pages(31, 32)]
    frames = Frames([pages(10, 16), pages(20, 22), pages(30, 32)], numbers, wanted)
    assert frames.same(numbers) == wanted


def test_same_pages_of_many_blocks_are_found() -> None:
    """Blocks that are the same as a whole, that differ in a page at either end, and that have absent or unwanted pages."""
    spans = [pages(7, 307)]
    own = [PRESENT | number for number in range(1, 301)]
    own[130] = 0  # not in memory
    theirs = list(own)
    assert Frames(spans, entries(*own), spans).same(entries(*theirs)) == [pages(7, 137), pages(138, 307)]
    for at in (63, 64, 127, 299):
        theirs[at] = PRESENT | 9999
    expected = [pages(7, 70), pages(72, 134), pages(135, 137), pages(138, 306)]
    assert Frames(spans, entries(*own), spans).same(entries(*theirs)) == expected
    wanted = [pages(7, 10), pages(100, 300)]
    expected = [pages(7, 10), pages(100, 134), pages(135, 137), pages(138, 300)]
    assert Frames(spans, entries(*own), wanted).same(entries(*theirs)) == expected


def test_frames_that_the_kernel_hides_are_not_compared() -> None:
    with pytest.raises(NotSupported, match="CAP_SYS_ADMIN"):
        Frames([pages(0, 2)], entries(PRESENT, PRESENT), [pages(0, 2)])


def test_only_pages_that_have_one_frame_in_all_readings_are_unchanged() -> None:
    spans = [pages(10, 14), pages(20, 22)]
    one = entries(PRESENT | 1, PRESENT | 2, PRESENT | 3, 4, PRESENT | 5, PRESENT | 6)
    two = entries(PRESENT | 1, PRESENT | 9, PRESENT | 3, 4, PRESENT | 5, PRESENT | 6)
    three = entries(PRESENT | 1, PRESENT | 2, PRESENT | 3, 4, PRESENT | 5, 6)
    assert unchanged(spans, one, one) == [pages(10, 13), pages(20, 22)], "a page that is not in memory has no frame"
    assert unchanged(spans, one, two) == [pages(10, 11), pages(12, 13), pages(20, 22)]
    assert unchanged(spans, one, two, three) == [pages(10, 11), pages(12, 13), pages(20, 21)]
    assert unchanged([], bytearray(), bytearray()) == []


def test_unchanged_pages_of_many_blocks_are_one_range() -> None:
    spans, numbers = [pages(7, 7 + 3000)], list(range(1, 3001))
    whole = entries(*(PRESENT | number for number in numbers))
    assert unchanged(spans, whole, whole) == spans
    numbers[1700] = 9999
    other = entries(*(PRESENT | number for number in numbers))
    assert unchanged(spans, whole, other) == [pages(7, 1707), pages(1708, 3007)]


def test_nothing_is_unchanged_if_the_kernel_hides_frames() -> None:
    hidden = entries(PRESENT, PRESENT)
    with pytest.raises(NotSupported, match="CAP_SYS_ADMIN"):
        unchanged([pages(0, 2)], hidden, hidden)


@pytest.mark.root
def test_what_is_read_of_a_page_is_its_frame_and_whether_it_is_in_memory() -> None:
    """The frame of a page that was written, and nothing of one that was not; no other flags, which differ after a fork."""
    memory = mmap.mmap(-1, 4 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise the kernel may fill the other pages as well
    memory[PAGE_BYTES : 3 * PAGE_BYTES] = b"x" * 2 * PAGE_BYTES
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with PageFrames(os.getpid()) as frames:
        found = frames.read([(start, start + 2 * PAGE_BYTES), (start + 2 * PAGE_BYTES, start + 4 * PAGE_BYTES)])
    numbers = struct.unpack("=4Q", found)
    assert (numbers[0], numbers[3]) == (0, 0)
    assert all(number & PRESENT and 0 < number & ~PRESENT < 1 << 55 for number in numbers[1:3])
    assert numbers[1] != numbers[2]


def test_only_ordinary_private_mappings_are_looked_at() -> None:
    text = b"""\
1000-2000 rw-p 00000000 00:00 0                          [heap]
2000-3000 r--p 00000000 08:01 77                         /lib/libc.so
3000-4000 rw-s 00000000 00:01 78                         /dev/shm/x
4000-5000 rw-p 00000000 00:06 79                         /dev/nvidia0
5000-6000 rw-p 00000000 00:0f 80                         /anon_hugepage (deleted)
6000-7000 ---p 00000000 00:00 0
7000-8000 rw-p 00000000 00:00 0                          [anon:arena]
8000-9000 r--p 00000000 00:00 0                          [vvar]
9000-a000 r-xp 00000000 00:00 0                          [vdso]
a000-b000 rw-p 00000000 00:00 0                          [stack]
"""
    assert private_mappings(text) == [(0x1000, 0x3000), (0x6000, 0x8000), (0xA000, 0xB000)]


def test_plain_mappings_can_be_written_and_have_no_file() -> None:
    text = b"""\
1000-2000 rw-p 00000000 00:00 0                          [heap]
2000-3000 rw-p 00000000 00:01 77                         /memfd:huge (deleted)
3000-4000 rw-p 00000000 00:0f 78                         /mnt/huge/x (deleted)
4000-5000 ---p 00000000 00:00 0
5000-6000 rwxp 00000000 00:00 0
6000-7000 r--p 00000000 00:00 0
"""
    assert private_mappings(text, plain=True) == [(0x1000, 0x2000)]


class Memory:
    """16 MiB of private memory."""

    def __init__(self) -> None:
        self.view = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view[:] = os.urandom(16 * MIB)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def write(self, first: int, last: int) -> None:
        for page in range(first, last):
            self.view[page * PAGE_BYTES] ^= 1

    def drop(self, first: int, last: int) -> None:
        self.view.madvise(mmap.MADV_DONTNEED, first * PAGE_BYTES, (last - first) * PAGE_BYTES)

    def shared(self, layer_pages: Ranges) -> list[tuple[int, int]]:
        """The page numbers of the ranges that lie in this memory."""
        whole = [(self.address, self.address + 16 * MIB)]
        return [
            ((start - self.address) // PAGE_BYTES, (end - self.address) // PAGE_BYTES)
            for start, end in page_ranges.common(list(layer_pages), whole)
        ]


def _child(memory: Memory, line: Connection) -> None:
    memory.write(100, 200)
    memory.drop(300, 310)
    line.send("ready")
    line.recv()


@pytest.fixture
def forked() -> Iterator[tuple[Memory, int]]:
    memory = Memory()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(memory, theirs))
    child.start()
    try:
        assert ours.poll(60)
        ours.recv()
        assert child.pid is not None
        yield memory, child.pid
    finally:
        ours.send("end")
        child.join(60)


@pytest.mark.root
def test_pages_that_neither_side_of_a_fork_has_written_are_shared(forked: tuple[Memory, int]) -> None:
    memory, child = forked
    memory.write(1000, 1001)
    memory.drop(2000, 2010)
    (layer,) = ForkSharing([os.getpid(), child]).layers()
    assert (layer.pid, layer.parent, layer.rounds) == (child, os.getpid(), ())
    assert memory.shared(layer.pages) == [(0, 100), (200, 300), (310, 1000), (1001, 2000), (2010, 4096)]


@pytest.mark.root
def test_process_whose_parent_is_not_in_the_rank_or_that_is_left_alone_shares_nothing(
    forked: tuple[Memory, int],
) -> None:
    _, child = forked
    assert ForkSharing([child]).layers() == []
    assert ForkSharing([os.getpid(), child], without=[child]).layers() == []
    assert ForkSharing([os.getpid(), child, 2**22 - 1]).layers() != [], "another process has ended"


@pytest.mark.root
def test_page_that_the_kernel_moves_meanwhile_is_not_shared(
    forked: tuple[Memory, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel moves a page of the parent after its frames were read: the write, which copies it, has the same effect."""
    memory, child = forked
    same = fork_sharing._same

    def moved(pid: int, parents: Frames) -> page_ranges.Ranges:
        found = same(pid, parents)
        memory.write(50, 51)
        return found

    monkeypatch.setattr(fork_sharing, "_same", moved)
    (layer,) = ForkSharing([os.getpid(), child]).layers()
    assert memory.shared(layer.pages)[:3] == [(0, 50), (51, 100), (200, 300)]


@pytest.mark.root
def test_rank_whose_frames_cannot_be_read_is_dumped_whole(
    forked: tuple[Memory, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_frames: PageFrames) -> list[page_ranges.Range]:
        raise PermissionError("the kernel does not allow it")

    monkeypatch.setattr(PageFrames, "private", refused)
    assert ForkSharing([os.getpid(), forked[1]]).layers() == []


def test_process_of_a_late_generation_is_dumped_whole() -> None:
    line = [Layer(pid=pid, pages=[(4096, 8192)], parent=pid - 1) for pid in range(2, 100)]
    kept = fork_sharing._without_deep(line)
    assert [layer.pid for layer in kept] == list(range(2, 2 + fork_sharing.MOST_GENERATIONS))
    described = below.described(kept)
    assert len(below.chain_of(kept[-1].pid, {pid: pid - 1 for pid in range(2, 100)}, described)) == len(kept) + 1


@pytest.mark.root
def test_zero_pages_and_shared_memory_are_no_private_pages() -> None:
    pages = [mmap.mmap(-1, MIB, flags=kind | mmap.MAP_ANONYMOUS) for kind in (mmap.MAP_PRIVATE, mmap.MAP_SHARED)]
    pages[1][:] = b"x" * MIB
    assert pages[0][:] == bytes(MIB)  # reads the zero page
    with PageFrames(os.getpid()) as frames:
        private = frames.private()
    for one in pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(one))
        assert page_ranges.common(private, [(start, start + MIB)]) == []
