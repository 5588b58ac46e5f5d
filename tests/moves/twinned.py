"""A rank with large memory and a twin, for tests: both are ordinary processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from snapshotd.criu import page_ranges
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.large_memory import LEAST_BYTES
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.moves.source.twins import Twin
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process
from snapshotd.transport.image.store import ImageStore

MOVE = "m-000000000001"
SIZE_BYTES = 2 * LEAST_BYTES
PATIENCE_S = 60.0


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


class Rank:
    """This process, with large memory; a child that only waits, or calls `act` when it is told to, is its twin."""

    def __init__(self, folder: Path, act: Callable[[Rank], object] | None = None) -> None:
        self._act = act
        self.memory = mmap.mmap(-1, SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.content = bytearray(os.urandom(SIZE_BYTES))
        self.content[3 * PAGE_BYTES : 90 * PAGE_BYTES] = bytes(87 * PAGE_BYTES)
        self.memory[:] = bytes(self.content)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        store, journal = ImageStore(folder / "images", on_disk=True), Journal(folder / "state")
        store.create(MOVE, 1 << 30)
        self.room = Room(folder / "room", "a")
        node = SimpleNamespace(
            config=SimpleNamespace(node="a", snapshot_copy_on_write=True),
            store=store,
            store_of=lambda _begin: store,
            journal=journal,
            room=self.room,
            saving={},
            adopters=set(),
        )
        self.node = cast(Any, node)
        where = ("train-0-01234567", "train", 0, "a", "a:1", "a", "a:1")
        self.log = journal.begin(
            Begin(MOVE, "source", *where, "00" * 32, "boot", 1.0, coordinator="m-c", kind="snapshot")
        )
        self.log.mark(Mark.BEGUN, pid=os.getpid(), start_ticks=1, cgroup=str(folder / "no-cgroup" / "rank"))
        self.twin = self._fork()

    def _fork(self) -> Process:
        self._line, self.theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                if self.theirs.recv(1) == b"g" and self._act is not None:
                    self.theirs.send(str(self._act(self)).encode())
                signal.pause()
            finally:
                os._exit(1)
        self.theirs.close()
        return Process.of(pid)

    def tell(self) -> str:
        """Has the twin act; what `act` has returned."""
        self._line.send(b"g")
        answer = self._line.recv(100).decode()
        assert answer, "the twin has failed"
        return answer

    def twins(self) -> TwinMemory:
        return TwinMemory(self.node, self.log, [Twin(os.getpid(), os.getpid(), self.twin)])

    def sealed(self) -> None:
        """Nothing but what its twin has is missing."""
        assert self.node.store.seal(MOVE, []) == []

    def end(self) -> None:
        self.twin.signal(signal.SIGKILL)
        os.waitpid(self.twin.pid, 0)
        self._line.close()
        self.room.close()


def within(rank: Rank, pages: page_ranges.Ranges) -> list[page_ranges.Range]:
    found = page_ranges.common(pages, [(rank.start, rank.start + SIZE_BYTES)])
    return [(start - rank.start, end - rank.start) for start, end in found]
