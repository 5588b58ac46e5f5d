"""The memory of a rank that is snapshotted, on its way from its twins (twins.py) into the image.

Invariant: a file gets its name in the folder of the image only when all of it, and all others, are complete. Until then the
snapshot does not count (`stored.is_whole`). The twins end when their memory was copied, or cannot be.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import Full, SnapshotError
from snapshotd.criu import page_ranges, pagemap_image
from snapshotd.criu.below import Layer, ahead_pages_name
from snapshotd.criu.page_ranges import Range
from snapshotd.moves import page_copy
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.page_copy import PageCopy
from snapshotd.moves.saved import Late, Saved
from snapshotd.moves.source import twins
from snapshotd.moves.source.large_memory import LEAST_BYTES, readers
from snapshotd.moves.source.twins import Twin
from snapshotd.proc import host, status
from snapshotd.proc.files import GONE
from snapshotd.proc.memory import memory_room
from snapshotd.proc.page_frames import PAGE_BYTES, NotSupported, PageFrames, unchanged
from snapshotd.proc.room import mib
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: Shorter runs of pages are left to criu: each takes a system call here, and an entry in a list on the target.
LEAST_RUN_BYTES = 64 << 10
WATCH_S = 0.1


@dataclass(frozen=True, slots=True)
class Shared:
    """The pages that a twin shares with the frozen rank."""

    twin: Twin
    layer: Layer
    memory: int  # a descriptor of the twin's memory

    @property
    def file(self) -> str:
        return ahead_pages_name(self.layer.pid, 1)

    @property
    def bytes(self) -> int:
        return page_ranges.size_bytes(self.layer.pages)


class TwinMemory:
    """What the twins of one rank have. Used on the loop that made it, except for `find`."""

    def __init__(self, node: Node, move_log: MoveLog, made: Sequence[Twin]) -> None:
        self._node, self._log = node, move_log
        self._twins, self._shared = list(made), list[Shared]()
        self._memories: list[int] = []
        self._saving: asyncio.Task[Saved] | None = None
        self._unwritten_bytes = 0
        self._short = ""  # why the twins were ended before all was copied

    # ------------------------------------------------------------------ while the rank is frozen

    def find(self, without: Collection[int] = ()) -> list[Layer]:
        """The pages that criu leaves out. `without`: processes that have other pages below their images, by the pids of their
        own namespace. Blocking. Raises nothing."""
        if not self._shared:
            for twin in self._twins:
                if twin.inner_pid not in without and (shared := _shared(twin)) is not None:
                    self._shared.append(shared)
                    self._memories.append(shared.memory)
            if not self._shared:
                self._end()
        return [one.layer for one in self._shared]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self._shared)

    def files(self) -> list[tuple[str, int]]:
        """The files that the image lacks until they are saved, and their sizes."""
        return [(one.file, one.bytes) for one in self._shared]

    def reserve(self) -> None:
        """The image is about to be sealed, and what is reserved for it is given up: not for these files."""
        self._unwritten_bytes = self.bytes
        self._node.store.promise(self._log.move, lambda: self._unwritten_bytes)

    # ------------------------------------------------------------------ while the rank runs again

    def save_soon(self) -> None:
        """Once: the rank goes on."""
        if self._saving is None and self._shared:
            self._saving = asyncio.create_task(self._save(), name=f"save host memory of {self._log.move}")
            self._node.saving[self._log.move, Late.HOST] = self._saving

    async def _save(self) -> Saved:
        began, failure = host.boottime_s(), ""
        try:
            await reach(Point.COPYING)
            with self._node.store.threads(self._log.move):
                await self._copy_all()
            await reach(Point.COPIED)
            await in_thread(self._end)
            with self._node.store.threads(self._log.move):
                await in_thread(self._give_names)
        except (SnapshotError, OSError) as error:
            failure = error.message if isinstance(error, SnapshotError) else str(error)
            log.error("memory of rank %s is not saved: %s", self._log.begin.rank, failure)
        finally:
            await in_thread(self._end)
        return Saved(self.bytes, host.boottime_s() - began, failure)

    async def _copy_all(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            for one in self._shared:
                await self._copy(one)
        except (SnapshotError, OSError) as error:
            if self._short:
                raise Full(self._short) from error
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _copy(self, one: Shared) -> None:
        copy, done = PageCopy(f"the twin of process {one.twin.of}"), False
        files: list[int] = []
        try:
            await in_thread(lambda: files.append(_new_file(self._path(one))))
            await copy.start(readers())
            pages = page_copy.packed(one.layer.pages)
            await copy.copy(page_copy.SAVE, [(one.memory, files[0], pages)], self._written)
            done = True
        finally:
            await copy.close()
            for file in files:  # a child that hangs has the file open: it gives up its memory
                await in_thread(os.ftruncate, file, one.bytes if done else 0)
                os.close(file)

    async def _watch(self) -> None:
        """The rank needs more memory while it writes what its twins have. Before its limit kills it, the twins end."""
        pid, floor_bytes = self._log.record.pid, twins.floor_bytes(Path(self._log.record.cgroup), self.bytes)
        while True:
            with contextlib.suppress(*GONE):
                whose, left_bytes = await in_thread(lambda: memory_room(pid)[0])
                if left_bytes < floor_bytes:
                    self._short = f"memory has run out while it was copied: {whose} leaves the rank {mib(left_bytes)}"
                    await in_thread(twins.end, self._node, self._log)
                    return
            await asyncio.sleep(WATCH_S)

    def _written(self, size_bytes: int) -> None:
        self._unwritten_bytes = max(0, self._unwritten_bytes - size_bytes)

    def _path(self, one: Shared) -> Path:
        return self._node.store.path(self._log.move) / f".{one.file}"

    def _give_names(self) -> None:
        folder = self._node.store.path(self._log.move)
        for one in self._shared:
            self._path(one).rename(folder / one.file)

    def _end(self) -> None:
        twins.end(self._node, self._log)
        while self._memories:
            os.close(self._memories.pop())
        self._node.store.withdraw(self._log.move)

    async def close(self) -> None:
        """The snapshot is given up: copies nothing more, and ends the twins. Idempotent."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        self._node.saving.pop((self._log.move, Late.HOST), None)
        await in_thread(self._end)


def _new_file(path: Path) -> int:
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _shared(twin: Twin) -> Shared | None:
    """None: not worth it, or not possible; criu dumps all of it."""
    if PAGE_BYTES != pagemap_image.PAGE_BYTES:  # on some arm64 machines
        return None
    try:
        memory = opened(twin)  # before anything is compared
        try:
            pages = _same_pages(twin)
        except BaseException:
            os.close(memory)
            raise
    except (NotSupported, OSError) as error:
        log.info("the memory of process %d is copied while it waits: %s", twin.of, error)
        return None
    if page_ranges.size_bytes(pages) < LEAST_BYTES:
        os.close(memory)
        return None
    return Shared(twin, Layer(pid=twin.inner_pid, pages=pages, rounds=[pages]), memory)


def opened(twin: Twin) -> int:
    """A descriptor of the twin's memory. Raises OSError if it is not, or not certainly, the memory of a process that is the
    rank's user's alone: the user decides what becomes of a twin.

    The pages must be compared after this: if the twin executes a program before the descriptor is opened, it shares no page
    with the rank any more. The other checks are made after the file was opened, as in foreign_memory_child.py.
    """
    pid = twin.process.pid
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, rank = status.read(pid), status.read(twin.of)
        # A program that had more rights, and has given them up, is not dumpable: the kernel gives its files to root.
        owner = os.stat(f"/proc/{pid}/mem").st_uid
        if not twin.process.alive():
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        if (found.user_ids, found.group_ids) != (rank.user_ids, rank.group_ids) or owner != rank.user_id:
            raise PermissionError(errno.EPERM, "its user is not that of the rank")
    except BaseException:
        os.close(memory)
        raise
    return memory


def _same_pages(twin: Twin) -> list[Range]:
    """The long runs of pages that have the same frames in the twin as in the frozen rank."""
    with PageFrames(twin.of) as rank, PageFrames(twin.process.pid) as there:
        runs = _long(rank.private(plain=True))
        before = rank.read(runs)
        theirs = there.read(runs)
        return _long(unchanged(runs, before, theirs, rank.read(runs)))  # the kernel may have moved pages meanwhile


def _long(ranges: Sequence[Range]) -> list[Range]:
    return [(start, end) for start, end in ranges if end - start >= LEAST_RUN_BYTES]
