"""Sends large memory of a frozen rank beside criu, with several threads.

criu reads one process after the other, in one thread, page by page; a rank with gigabytes of memory would wait for it. So
long runs of pages are read here, while criu dumps the rest. To criu and to the target they are pages that
were sent before the freeze (snapshotd/criu/below.py), of several rounds: each is a file, in the order of their addresses,
and the target writes several files at the same time. Into one file the kernel lets only one thread write.

Left to criu are pages of executable mappings, because it writes a few instructions into one of them, runs them, and puts back
what was there; processes whose pages lie in their parent's image, because a process has pages of one kind only below its own;
and the pages of a parent that its children share, because criu's restore has them shared again.

Only anonymous pages that are in memory, of mappings without a file, are read: reading them never waits for a user's program.
The rank is frozen, so what is read is what criu would have read.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from snapshotd.api.errors import Internal, RankGone, SnapshotError, Where
from snapshotd.criu import page_ranges, pagemap_image
from snapshotd.criu.below import Layer, ahead_pages_name
from snapshotd.criu.page_ranges import Range, Ranges
from snapshotd.moves.source.process_memory import ProcessMemory, chunks
from snapshotd.proc import status
from snapshotd.proc.files import GONE
from snapshotd.proc.page_frames import PAGE_BYTES, NotSupported, PageFrames
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span
from snapshotd.transport.image.frame import Frame, raw_frame
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)

#: Shorter runs of pages are left to criu: each takes a system call here, and an entry in a list on both nodes.
LEAST_RUN_BYTES = 256 << 10
#: A process that has less is left to criu.
LEAST_BYTES = 16 << 20
#: One reads 7 GB/s; more only wait for each other, and keep the threads that send from their work.
MOST_READERS = 4
#: Files of one process, which the target writes at the same time, and how much each has at least.
MOST_FILES, LEAST_FILE_BYTES = 8, 16 << 20
#: Runs, times files: the list of each file has those of the ones before it as well.
MOST_PIECES = 50_000


class ReadBeside(Protocol):
    """Memory of one process that is read beside criu."""

    @property
    def pid(self) -> int: ...
    @property
    def layer(self) -> Layer: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def size_bytes(self) -> int:
        """How much is read."""

    def frames(self, sender: Sender, memory: ProcessMemory) -> Iterator[Callable[[int], Frame]]:
        """What reads the chunks of the files, which they cover: each is called in a thread, with a number of the sender's.
        May raise OSError."""


@dataclass(frozen=True, slots=True)
class LargeMemory:
    """The long runs of pages of one process."""

    pid: int
    layer: Layer

    @property
    def files(self) -> Sequence[str]:
        return [ahead_pages_name(self.layer.pid, number) for number, _ in enumerate(self.layer.rounds, 1)]

    @property
    def size_bytes(self) -> int:
        return page_ranges.size_bytes(self.layer.pages)

    def frames(self, sender: Sender, memory: ProcessMemory) -> Iterator[Callable[[int], Frame]]:
        """A chunk of each file in turn."""
        names = self.files
        for in_turn in itertools.zip_longest(*(chunks(pages, sender.chunk_bytes) for pages in self.layer.rounds)):
            for file, chunk in zip(names, in_turn, strict=True):
                if chunk is not None:
                    yield partial(self._frame, sender, memory, file, *chunk)

    @staticmethod
    def _frame(
        sender: Sender, memory: ProcessMemory, file: str, offset: int, parts: Sequence[Range], sequence: int
    ) -> Frame:
        data = sender.filled(page_ranges.size_bytes(parts), partial(memory.fill, parts))
        return raw_frame(sequence, file, offset, data, strong=sender.strong)


def find(pids: Iterable[int], layers: Iterable[Layer] = (), without: Collection[int] = ()) -> list[LargeMemory]:
    """What is worth sending, besides these layers; `without` are processes that are left to criu, by the pids of their own
    namespace. Blocking. The rank is frozen."""
    taken, shared = set(without), defaultdict[int, list[Ranges]](list)
    for layer in layers:
        taken.add(layer.pid)
        if layer.parent is not None:
            shared[layer.parent].append(layer.pages)
    found = []
    if PAGE_BYTES != pagemap_image.PAGE_BYTES:  # on some arm64 machines
        return []
    try:
        for pid in pids:
            try:
                if (inner_pid := status.read(pid).inner_pid) in taken:
                    continue
                with PageFrames(pid) as frames:
                    private = frames.private(plain=True)
            except GONE:
                continue
            runs = _long(private)
            for pages in shared[inner_pid]:
                if page_ranges.size_bytes(runs) < LEAST_BYTES:
                    break
                runs = _long(page_ranges.without(runs, pages))
            if page_ranges.size_bytes(runs) >= LEAST_BYTES:
                found.append(LargeMemory(pid, Layer(pid=inner_pid, pages=runs, rounds=_divided(runs))))
    except (NotSupported, OSError) as error:
        log.info("all memory is left to criu: %s", error)
        return []
    return found


def _long(pages: Ranges) -> list[Range]:
    return [(start, end) for start, end in pages if end - start >= LEAST_RUN_BYTES]


def _divided(runs: Ranges) -> list[list[Range]]:
    """The pages of each file."""
    size_pages = page_ranges.size_bytes(runs) // PAGE_BYTES
    count = max(1, min(MOST_FILES, size_pages * PAGE_BYTES // LEAST_FILE_BYTES, MOST_PIECES // len(runs)))
    return [parts for _, parts in chunks(runs, -(-size_pages // count) * PAGE_BYTES)]


async def send(sender: Sender, memory: Sequence[ReadBeside]) -> None:
    """Reads and sends all of it. Raises RankGone if a process has ended, Internal if its memory cannot be read."""
    if not memory:
        return
    with span("send large memory"), ExitStack() as opened:
        for one in memory:
            reading = _Reading(sender, one)
            opened.callback(reading.close)
            async with asyncio.TaskGroup() as group:
                for _ in range(readers()):
                    group.create_task(sender.put_frames(one.files, reading.next))
            await in_thread(reading.must_live)


def readers() -> int:
    return max(1, min(MOST_READERS, (os.cpu_count() or 1) // 2))


class _Reading:
    """Makes the chunks of one process, for several threads."""

    def __init__(self, sender: Sender, memory: ReadBeside) -> None:
        self._sender, self._memory = sender, memory
        try:
            self._read = ProcessMemory(memory.pid)
        except OSError as error:
            raise self._failed(error) from error
        self._frames = memory.frames(sender, self._read)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._read.close()

    def must_live(self) -> None:
        """Raises RankGone if the process has ended."""
        try:
            self._read.must_live()
        except OSError as error:
            raise self._failed(error) from error

    def next(self, sequence: int) -> Frame | None:
        """The next chunk; None at the end. Blocking."""
        with self._lock:
            make = next(self._frames, None)
        try:
            return make and make(sequence)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SnapshotError:
        if isinstance(error, GONE):
            return RankGone(f"process {self._memory.pid} has ended", where=Where.UNKNOWN)
        return Internal(f"process {self._memory.pid} cannot be read: {error.strerror}", where=Where.SOURCE_FROZEN)
