"""The target's storage for images: one directory per move on a tmpfs, mode 0700, removed when the move ends.

Invariant: a byte is in an image file only if the digest of its chunk was right, and a move is sealed only if every file is
complete: its chunks cover it from 0 to its size, and their digests are those of the source. Only sealed images are
restored. A damaged, late, unexpected or oversized chunk changes nothing.

Every method may be called from any thread; slow work happens outside the locks. The seal is stored with the images, so a
restarted daemon recognises sealed images; of a partial one it knows only that it exists.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from snapshotd.api.errors import Damaged, Full, NotFound, SnapshotError, WrongState
from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.proc import meminfo
from snapshotd.proc.room import Room, mib
from snapshotd.runtime.blocking import waiting_for_disk
from snapshotd.transport.image.chunk_list import is_complete
from snapshotd.transport.image.frame import Answer, Frame, Kind
from snapshotd.transport.image.known_blocks import KnownBlocks
from snapshotd.transport.image.overlay import file_of
from snapshotd.transport.image.receiving import Receiving, check_sane
from snapshotd.transport.image.sparse_file import put
from snapshotd.transport.image.storage_errors import translated
from snapshotd.transport.image.sync import sync_files, sync_folder

log = logging.getLogger(__name__)

MOVE_NAME = re.compile(r"m-[0-9a-f]{12}")
MAX_FILES = 100_000
MAX_CHUNKS = 1 << 20
#: What images have reserved, in `Room`.
ROOM = "images"
#: What images on a disk leave free there for everything else; of a small file system the twentieth part.
LEFT_FREE_BYTES = 1 << 30
_SEAL_NAME = ".sealed"  # not a valid name of an image file


def nothing(_bytes: int) -> None:
    return None


class ImageStore:
    """All images on this node, by move."""

    def __init__(self, image_dir: Path, *, on_disk: bool = False, room: Room | None = None) -> None:
        """`on_disk`: for images that are kept. They must not be limited by the machine's memory, and survive a reboot.
        `room`: where the memory of other images is reserved; None: no others use this machine."""
        self._root, self._on_disk, self._room = image_dir, on_disk, room
        self._lock = threading.Lock()  # never held while the file system works: all images here use it
        self._creating = threading.Lock()  # one reservation at a time
        self._receiving: dict[str, Receiving] = {}
        self._sealed: dict[str, str] = {}  # move -> the sealed list of files
        self._dropping: list[threading.Thread] = []
        self._undropped: set[str] = set()
        self._promised: dict[str, Callable[[], int]] = {}  # by move: bytes of files that are written after the seal
        self.known_blocks = KnownBlocks(room)
        if room is not None and not on_disk:
            room.count(ROOM, self.reserved_bytes)
        image_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        image_dir.chmod(0o700)
        self._leftovers = {entry.name for entry in os.scandir(image_dir) if MOVE_NAME.fullmatch(entry.name)}
        for move in self._leftovers:
            try:
                self._sealed[move] = (image_dir / move / _SEAL_NAME).read_text()
            except FileNotFoundError:
                continue

    def create(self, move: str, capacity_bytes: int, rings_bytes: int = 0) -> None:
        """Reserves memory for a move, Full if none is free. Idempotent. Removes partial images of before a restart.
        `rings_bytes`: part of it, for the rings of the device-memory channel."""
        directory = self._directory(move)
        self.dropped()
        with self._creating, self._room.turn() if self._room is not None else nullcontext():
            if self.sealed(move):
                raise WrongState(f"the images of {move} are already here and sealed")
            if move in self._receiving:
                return
            if move in self._leftovers:
                shutil.rmtree(directory, ignore_errors=True)
                with self._lock:
                    self._leftovers.discard(move)
            room_bytes = self.room_bytes()
            if capacity_bytes > room_bytes:
                why = f": {self._room.free()}" if self._room is not None and not self._on_disk else ""
                raise Full(f"{move} needs {mib(capacity_bytes)} for its images, {mib(room_bytes)} are free{why}")
            try:
                directory.mkdir(mode=0o700)
            except OSError as error:
                raise translated(error, f"creating {directory}") from error
            with self._lock:
                self._receiving[move] = Receiving(directory, capacity_bytes, rings_bytes=rings_bytes)

    def write(self, move: str, frame: Frame) -> bool:
        """Writes one chunk; False, with nothing written, if it arrived damaged and must be sent again.

        Idempotent. A different chunk at the same offset is Damaged: the source contradicts itself.
        """
        if not frame.intact():
            return False
        check_sane(frame)
        with self._writing(move) as receiving:
            with receiving.changed:
                known = receiving.chunks.get(frame.name, {}).get(frame.offset)
                self._check_admissible(move, receiving, frame, known)
                if known is not None:
                    return True
                receiving.written_bytes += receiving.covered.add(frame)
                replaces = receiving.covered.all_of(frame)
            try:
                put(receiving.directory / file_of(frame.name), frame, replaces=replaces)
            except OSError as error:
                raise translated(error, f"writing {frame.name} of {move}") from error
            with receiving.changed:
                chunk = (frame.length, frame.digest)
                if receiving.chunks.setdefault(frame.name, {}).setdefault(frame.offset, chunk) != chunk:
                    raise Damaged(f"{frame.name} of {move}: two different chunks at {frame.offset}")
                receiving.chunk_count += 1
        return True

    def take(self, move: str, frame: Frame) -> Answer:
        """Writes one chunk, as `write`, or puts one together that is offered. Returns the answer to it."""
        if frame.kind is Kind.BLOCKS:
            with self._writing(move):  # it is not dropped in the meantime
                found = self.known_blocks.put_together(move, frame)
            if isinstance(found, bytes):
                return Answer(Kind.MISSING, frame.sequence, found)
            frame = found
        if self.write(move, frame):
            return Answer(Kind.OK, frame.sequence)
        log.warning("images of %s: %s at %d arrived damaged", move, frame.name, frame.offset)
        return Answer(Kind.BAD, frame.sequence)

    def seal(
        self, move: str, files: Sequence[ImageFile], *, sync: bool = True, synced: Callable[[int], None] = nothing
    ) -> list[str]:
        """The names of files that are incomplete, missing or unexpected. If there are none, the move is sealed. `sync`: False
        if a rank waits for it, and `sync` is called later. `synced` is called with bytes that a disk has."""
        directory = self._directory(move)
        wanted = Counter(file.name for file in files)
        summary = json.dumps(sorted((file.name, file.size, file.chunks, file.digest.hex()) for file in files))
        with self._lock:
            if (sealed := self._sealed.get(move)) is not None:
                if sealed != summary:
                    raise WrongState(f"the images of {move} are already sealed, with a different list of files")
                return []
            receiving = self._receiving.get(move)
        if receiving is None:
            raise _unknown(move)
        with receiving.changed:
            receiving.close()
            receiving.drop_unlisted(wanted)
            damaged = {file.name for file in files if not is_complete(file, receiving.chunks.get(file.name, {}))}
            damaged |= set(receiving.chunks) - set(wanted)
            damaged |= {name for name, times in wanted.items() if times > 1}
            if damaged:
                receiving.closed = False
                return sorted(damaged)
        try:
            for file in files:
                os.truncate(directory / file_of(file.name), file.size)  # a hole at the end was never written
            fresh = directory / (_SEAL_NAME + "-fresh")
            fresh.touch(mode=0o600)
            fresh.write_text(summary)
            if self._on_disk and sync:
                sync_files(directory, synced)
            fresh.rename(directory / _SEAL_NAME)
            if self._on_disk and sync:
                sync_folder(directory, self._root)
        except OSError as error:
            with receiving.changed:
                receiving.closed = False
            raise translated(error, f"sealing {move}") from error
        with self._lock:
            self._sealed[move] = summary
            self._receiving.pop(move, None)
        self.known_blocks.forget(move)
        return []

    def sync(self, move: str, synced: Callable[[int], None] = nothing) -> None:
        """What `seal` has left out, and files that were added since. Until then a disk may have failed without a word."""
        directory = self.path(move)
        if self._on_disk:
            try:
                sync_files(directory, synced)
                sync_folder(directory, self._root)
            except OSError as error:
                raise translated(error, f"writing the images of {move} to the disk") from error

    def sealed(self, move: str) -> bool:
        """Whether the move's images are complete and verified; known after a restart of the daemon too."""
        with self._lock:
            return move in self._sealed

    def moves(self) -> set[str]:
        """The moves of which anything is here."""
        with self._lock:
            return {*self._receiving, *self._sealed, *self._leftovers}

    def threads(self, move: str) -> AbstractContextManager[None]:
        """Inside, `in_thread` is for what reads or writes the move's images."""
        return waiting_for_disk() if self._on_disk else nullcontext()

    def path(self, move: str) -> Path:
        """The directory with the move's images, for CRIU."""
        directory = self._directory(move)
        with self._lock:
            if move not in self._receiving and move not in self._sealed and move not in self._leftovers:
                raise _unknown(move)
        return directory

    def drop(self, move: str) -> None:
        """Removes the move's images; later chunks are refused. Idempotent."""
        directory = self._directory(move)
        with self._lock:
            receiving = self._receiving.get(move)
        if receiving is not None:
            with receiving.changed:
                receiving.closed = True
                receiving.changed.wait_for(lambda: not receiving.writers)
        self.known_blocks.forget(move)
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translated(error, f"removing the images of {move}") from error
        with self._lock:
            self._receiving.pop(move, None)
            self._sealed.pop(move, None)
            self._leftovers.discard(move)
        self.withdraw(move)

    def drop_soon(self, move: str) -> None:
        """Drops in the background: freeing a large image takes seconds. A request for memory waits for it."""

        def drop() -> None:
            try:
                self.drop(move)
            except SnapshotError as error:  # tried again by the next request for memory, and when the daemon starts
                log.warning("%s", error.message)
                with self._lock:
                    self._undropped.add(move)

        thread = threading.Thread(target=drop, name=f"drop {move}", daemon=True)
        with self._lock:
            self._dropping = [other for other in self._dropping if other.is_alive()]
            thread.start()  # under the lock: a thread that has not started cannot be joined
            self._dropping.append(thread)

    def dropped(self) -> None:
        """Waits until all background drops have finished."""
        with self._lock:
            dropping = list(self._dropping)
            undropped, self._undropped = self._undropped, set()
        for thread in dropping:
            thread.join()
        for move in undropped:
            self.drop_soon(move)

    def held_bytes(self) -> int:
        """Memory that images use on this node. A file that several of them share counts once."""
        found: dict[int, int] = {}  # by inode
        for directory in self._root.iterdir():
            if not MOVE_NAME.fullmatch(directory.name):
                continue
            with suppress(FileNotFoundError):  # dropped in the meantime
                for entry in os.scandir(directory):
                    status = entry.stat(follow_symlinks=False)
                    found[status.st_ino] = status.st_blocks * 512
        return sum(found.values())

    def room_bytes(self) -> int:
        """Memory that is free and not reserved for a move.

        Takes no lock of the store: it is asked for inside a turn of the room (proc/room.py), and `create` takes the turn
        inside the lock."""
        return max(0, self._free_bytes() - self.reserved_bytes())

    def set_aside(self, move: str, names: Sequence[str], size_bytes: int, *, rings: bool = False) -> None:
        """Sets aside part of the move's memory for these files, which the device-memory channel writes. What they use does
        not count as reserved any more. The last call wins. Where `create` has reserved nothing but rings, or the files are
        `rings`, reserves what is missing: Full if it is not free."""
        with self._lock:
            receiving = self._receiving.get(move)
        if receiving is None:
            raise _unknown(move)
        with self._room.turn() if self._room is not None else nullcontext():  # a writer asks for room with its own lock
            more_bytes = size_bytes - receiving.rings_bytes if rings or receiving.rings_bytes else 0
            if more_bytes > 0:
                if (room_bytes := self.room_bytes()) < more_bytes:
                    raise Full(f"{move} needs {mib(more_bytes)} more for its device memory, {mib(room_bytes)} are free")
                receiving.capacity_bytes += more_bytes
                receiving.rings_bytes = size_bytes
        with receiving.changed:
            receiving.beside, receiving.beside_bytes = tuple(names), size_bytes

    def refuse(self, move: str, why: str) -> None:
        """Writes nothing more of this move: a chunk is answered with Full. Idempotent."""
        with self._lock:
            receiving = self._receiving.get(move)
        if receiving is not None:
            with receiving.changed:
                receiving.refused = why

    def reserved_bytes(self) -> int:
        """What is reserved for moves that are still arriving, or is promised to files of others, and not used yet."""
        arriving = sum(
            max(0, one.capacity_bytes - one.written_bytes - one.taken_beside_bytes())
            for one in list(self._receiving.values())
        )
        return arriving + sum(untaken() for untaken in list(self._promised.values()))

    def promise(self, move: str, untaken: Callable[[], int]) -> None:
        """What is reserved for the move ends with its seal. From now on what `untaken` returns stays reserved, for files that
        are written into its folder later."""
        self._promised[move] = untaken

    def withdraw(self, move: str) -> None:
        """Nothing is promised to the move any more. Idempotent."""
        if self._promised.pop(move, None) is not None and self._room is not None:
            self._room.state()

    def capacity_bytes(self) -> int:
        """The most memory that images could use now: what they use, and what is free."""
        return self.held_bytes() + self._free_bytes()

    def _directory(self, move: str) -> Path:
        if not MOVE_NAME.fullmatch(move):
            raise NotFound(f"{move[:100]!r} is not the name of a move")
        return self._root / move

    @contextmanager
    def _writing(self, move: str) -> Iterator[Receiving]:
        """While a chunk is being written, the move cannot be sealed or dropped."""
        self._directory(move)
        with self._lock:
            receiving = self._receiving.get(move)
            sealed = move in self._sealed
        if sealed:
            raise WrongState(f"the images of {move} are sealed and cannot be changed")
        if receiving is None:
            raise _unknown(move)
        with receiving.changed:
            if receiving.closed:
                raise WrongState(f"the images of {move} are being sealed or dropped")
            if receiving.refused:
                raise Full(receiving.refused)
            receiving.writers += 1
        try:
            yield receiving
        finally:
            with receiving.changed:
                receiving.writers -= 1
                receiving.changed.notify_all()

    def _check_admissible(self, move: str, receiving: Receiving, frame: Frame, known: tuple[int, bytes] | None) -> None:
        if known is not None:
            if known != (frame.length, frame.digest):
                raise Damaged(f"{frame.name} of {move}: two different chunks at {frame.offset}")
            return
        if frame.name not in receiving.chunks and len(receiving.chunks) >= MAX_FILES:
            raise Damaged(f"{move} has more than {MAX_FILES} files")
        if receiving.chunk_count >= MAX_CHUNKS:
            raise Damaged(f"{move} has more than {MAX_CHUNKS} chunks")
        if self._on_disk and self._free_bytes() < frame.payload_bytes:
            raise Full(f"the disk of {self._root} is full, except what images leave free there")
        # A rank may have grown since its memory was reserved. That is harmless if no other move's memory is taken.
        over_bytes = receiving.written_bytes + frame.payload_bytes - receiving.capacity_bytes
        if over_bytes + receiving.beside_bytes > 0:
            over_bytes += receiving.taken_beside_bytes()
        if over_bytes > 0 and self.room_bytes() < frame.payload_bytes:
            raise Full(f"{move} needs more than its {mib(receiving.capacity_bytes)}, and no more memory is free")

    def _disk_bytes(self) -> int:
        storage = os.statvfs(self._root)
        free_bytes = storage.f_bavail * storage.f_frsize
        if self._on_disk:
            free_bytes -= min(LEFT_FREE_BYTES, storage.f_blocks * storage.f_frsize // 20)
        return max(0, free_bytes)

    def _free_bytes(self) -> int:
        """The smaller of the tmpfs limit and the available memory: a tmpfs may be larger than the machine's memory."""
        free_bytes = self._disk_bytes()
        if self._on_disk:
            return free_bytes
        memory_bytes = self._room.free(without=ROOM).bytes if self._room is not None else meminfo.available_bytes()
        return min(free_bytes, memory_bytes)


def _unknown(move: str) -> NotFound:
    return NotFound(f"this node has no images of {move}")
