"""Places pages of an image into the restored processes, which criu has left empty there (snapshotd/criu/placed.py).

Several children write at the same time: criu's own restore has one thread for each process. They start while criu restores.

Invariant: the processes are stopped and frozen, and have not run since they were restored: what is written is what they had.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from snapshotd.api.errors import CriuFailed, SnapshotError, Where
from snapshotd.criu.placed import PlacedPages
from snapshotd.moves import page_copy
from snapshotd.moves.page_copy import Copy, PageCopy
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

#: More write hardly faster: they wait for each other in the kernel.
MOST_WRITERS = 8
#: For less than this a child would start in vain.
BYTES_PER_WRITER = 64 << 20


class Placing:
    """The pages of one image."""

    def __init__(self, folder: Path, placed: Sequence[PlacedPages], *, keeps_pages: bool) -> None:
        """`keeps_pages`: the files are also those of another image, and stay as they are. Others give up each page that was
        placed, so that the node never has it twice."""
        self._folder, self._placed = folder, placed
        self._direction = page_copy.PLACE if keeps_pages else page_copy.MOVE
        self._copy = PageCopy("the memory of the restored copy")
        self.bytes = sum(one.bytes for one in placed)

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[None]:
        """Starts the children, and ends them at the end."""
        wanted = -(-self.bytes // BYTES_PER_WRITER)
        self._starting = asyncio.create_task(self._copy.start(min(wanted, MOST_WRITERS, os.cpu_count() or 1)))
        try:
            yield
        finally:
            await asyncio.gather(self._starting, return_exceptions=True)
            await self._copy.close()

    async def run(self, processes: Callable[[], Mapping[int, int]]) -> None:
        """`processes` looks up the processes of the copy, by the pids of their own namespace. Raises CriuFailed with the
        reason if not all could be placed: the copy must not run."""
        try:
            await self._starting
            await reach(Point.PLACING)
            with contextlib.ExitStack() as opened:
                copies = await in_thread(self._open_all, processes, opened)
                await self._copy.copy(self._direction, copies, lambda _: None)
        except (SnapshotError, OSError) as error:
            reason = error.message if isinstance(error, SnapshotError) else str(error)
            text = f"the memory of the copy cannot be restored: {reason}"
            raise CriuFailed(text, where=Where.SOURCE_FROZEN) from error

    def _open_all(self, processes: Callable[[], Mapping[int, int]], opened: contextlib.ExitStack) -> list[Copy]:
        pids = processes()
        memories: dict[int, int] = {}
        for inner_pid in {one.pid for one in self._placed}:
            if inner_pid not in pids:
                raise ProcessLookupError(f"it has no process {inner_pid}")
            memories[inner_pid] = os.open(f"/proc/{pids[inner_pid]}/mem", os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, memories[inner_pid])
        # Its user can kill one, whose pid may have been given to any program before it was opened. Nothing can have become a
        # process of the copy meanwhile: all are frozen.
        still = processes()
        for inner_pid in memories:
            if still.get(inner_pid) != pids[inner_pid]:
                raise ProcessLookupError(f"process {inner_pid} of it has ended")
        copies: list[Copy] = []
        for one in self._placed:
            file = os.open(self._folder / one.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, file)
            copies.append((memories[one.pid], file, one.pieces))
        return copies
