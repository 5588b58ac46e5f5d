"""The target's side of offered chunks (blocks.py): finds their blocks in images that are here already.

Invariant: blocks are taken only from sealed images of which `images_for` says that the move may use them. Others are not even
searched, so a source learns nothing about images of other users and jobs.

Whatever goes wrong here (an image is dropped in the meantime, a file cannot be read) is answered with MISSING, and the source
sends the content. There is one index for each set of moves that may use the same images, kept as long as one of them is
arriving. Its memory is reserved before it is made; an image for whose index there is no room is not searched.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.proc.room import RESERVE_BYTES, Room, mib
from snapshotd.transport.image.block_index import BlockIndex, most_bytes
from snapshotd.transport.image.blocks import Offered
from snapshotd.transport.image.frame import Frame

log = logging.getLogger(__name__)

#: Who may use the images (moves with the same key share an index), and the folders of those images.
Usable = tuple[Hashable, Sequence[Path]]


@dataclass
class _Shared:
    """An index, and the moves that use it."""

    index: BlockIndex = field(default_factory=BlockIndex)
    building: threading.Lock = field(default_factory=threading.Lock)
    folders: set[Path] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    unread: dict[str, Sequence[Path]] = field(default_factory=dict)  # by move: images that are not in the index yet
    promised_bytes: int = 0  # the most that the index will have when it is built

    @property
    def purpose(self) -> str:
        return f"block index {id(self)}"

    def untaken_bytes(self) -> int:
        return max(0, self.promised_bytes - self.index.memory_bytes)


class KnownBlocks:
    """All blocks that arriving images may use. Every method may be called from any thread."""

    def __init__(self, room: Room | None = None) -> None:
        """`room`: where the memory of indexes is reserved; None: it is not."""
        self._room = room
        #: Which images the move may use; none unless the daemon says so.
        self.images_for: Callable[[str], Usable] = lambda _move: (None, ())
        self._lock = threading.Lock()
        self._shared: dict[Hashable, _Shared] = {}
        self._of: dict[str, _Shared] = {}  # by move

    def put_together(self, move: str, frame: Frame) -> Frame | bytes:
        """The whole chunk, whose digest is still to be verified, or a bitmap of the blocks that are missing. Damaged if the
        offer contradicts itself. Blocking; the first offer of a move waits for the index."""
        offered = Offered.parse(frame)
        index = self._index(move)
        data = bytearray(frame.length)
        for number, content in offered.contents.items():
            start, end = offered.spans[number]
            data[start - frame.offset : end - frame.offset] = content
        if missing := _fill(memoryview(data), offered, index):
            return offered.missing(missing)
        return offered.whole(data)

    def forget(self, move: str) -> None:
        """The move has all its images, or is dropped. Idempotent."""
        with self._lock:
            shared = self._of.pop(move, None)
            if shared is None:
                return
            shared.users.discard(move)
            if shared.users:
                return
            self._shared = {key: other for key, other in self._shared.items() if other is not shared}
        if self._room is not None:
            self._room.give_up(shared.purpose)

    def _index(self, move: str) -> BlockIndex:
        with self._lock:
            shared = self._of.get(move)
        if shared is None:
            key, folders = self.images_for(move)
            with self._lock:
                if (shared := self._of.get(move)) is None:  # else another stream of this move was faster
                    shared = self._of[move] = self._shared.setdefault(key, _Shared())
                    shared.users.add(move)
                    shared.unread[move] = folders
        with shared.building:  # the other streams of this move wait for the index
            self._build(shared, shared.unread.pop(move, ()))
        return shared.index

    def _build(self, shared: _Shared, folders: Sequence[Path]) -> None:
        began_s, before = time.monotonic(), len(shared.index)
        for folder in folders:
            if folder in shared.folders:
                continue
            try:
                files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
                if not self._reserve(shared, sum(most_bytes(path) for path in files), folder):
                    continue  # not known: there may be room for it when the next copy comes
                shared.folders.add(folder)
                for path in files:
                    shared.index.add(path)
            except OSError as error:  # dropped in the meantime, say
                log.info("not all blocks of %s are known: %s", folder, error)
            finally:
                shared.promised_bytes = 0  # what it takes, it has
        if added := len(shared.index) - before:
            log.info("know %d blocks of images in %.2f s", added, time.monotonic() - began_s)

    def _reserve(self, shared: _Shared, size_bytes: int, folder: Path) -> bool:
        """Whether there is room for so much more, which is then reserved."""
        if self._room is None:
            return True
        with self._room.turn():
            free = self._room.free()
            if free.bytes < size_bytes + RESERVE_BYTES:
                log.warning(
                    "copies that could use blocks of %s are sent whole: an index needs %s and a reserve of %s, and %s",
                    *(folder.name, mib(size_bytes), mib(RESERVE_BYTES), free),
                )
                return False
            shared.promised_bytes = shared.index.memory_bytes + size_bytes
            self._room.count(shared.purpose, shared.untaken_bytes)
        return True


def _fill(data: memoryview, offered: Offered, index: BlockIndex) -> list[int]:
    """Reads the blocks that are offered by digest; the numbers of those that are not found. Adjacent ones are read at once:
    weights lie in the same order in both images."""
    missing: list[int] = []
    with ExitStack() as stack:
        opened: dict[Path, int] = {}

        def read(path: Path, at: int, start: int, end: int, numbers: list[int]) -> None:
            try:
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    stack.callback(os.close, opened[path])
                if os.preadv(opened[path], [data[start:end]], at) == end - start:
                    return
            except OSError as error:
                log.info("blocks of %s are not here any more: %s", path, error)
            missing.extend(numbers)

        run: tuple[Path, int, int, int, list[int]] | None = None
        for number, digest in offered.digests.items():
            start, end = (edge - offered.frame.offset for edge in offered.spans[number])
            found = index.find(digest)
            if found is None:
                missing.append(number)
                continue
            path, at = found
            if run is not None and (path, at - run[1], start) == (run[0], run[3] - run[2], run[3]):
                run[4].append(number)
                run = (path, run[1], run[2], end, run[4])
                continue
            if run is not None:
                read(*run)
            run = (path, at, start, end, [number])
        if run is not None:
            read(*run)
    return missing
