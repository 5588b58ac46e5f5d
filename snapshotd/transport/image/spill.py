"""Images of snapshots for which there is no memory, on a local disk (`snapshot_spill_dir`).

Invariant: all files of an image are in one place, in memory or on the disk, which is chosen when room is reserved for it. An
image on the disk is used like one in memory: a restart of the daemon finds it again, and after a boot it is gone, because the
ranks whose node it was may run elsewhere by then. Only root can read it. A disk that is full, read-only or does not answer
makes snapshots fail; it keeps no rank from going on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from snapshotd.api.errors import BadConfig, Full, SnapshotError
from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.proc import host
from snapshotd.proc.room import Room
from snapshotd.transport.image.frame import Answer, Frame
from snapshotd.transport.image.store import MOVE_NAME, ImageStore, nothing
from snapshotd.transport.image.sync import sync_folder

log = logging.getLogger(__name__)

KEY = "snapshot_spill_dir"
#: The boot by which the images were made. The daemon that uses the directory has a lock on it.
_BOOT = ".boot"
_NOT_OURS = {_BOOT, "lost+found"}
_REMEDY = f"free memory on that node, or set {KEY} in its snapshotd.toml, so that what has no room lies on a disk"


def problem(folder: Path) -> str:
    """Why images must not be stored there; empty: they may. Blocking."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return f"{folder} is not a directory"
        if found.st_uid != os.geteuid():
            return f"{folder} belongs to another user than root"
        for above in folder.parents:
            if (mode := above.stat().st_mode) & 0o022 and not mode & stat.S_ISVTX:
                return f"users may replace {folder}: they may write to {above}"
        if host.is_ram_backed(folder):
            return f"{folder} is in memory, on a tmpfs, and not on a disk"
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return f"the file system of {folder} is read-only"
        if not (folder / _BOOT).exists() and set(os.listdir(folder)) - _NOT_OURS:
            return f"{folder} is not empty, and what is in it was not made by this daemon"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


class SpillDisk(ImageStore):
    """The images on the disk."""

    def __init__(self, folder: Path) -> None:
        """Removes what was stored before this boot. Raises BadConfig if the directory cannot be used. Blocking."""
        if why := problem(folder):
            raise BadConfig(why)
        try:
            self._boot_file = os.open(folder / _BOOT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._begin(folder)
                super().__init__(folder, on_disk=True)
            except BaseException:
                os.close(self._boot_file)
                raise
        except BlockingIOError as error:
            raise BadConfig(f"{folder} is used by another daemon") from error
        except OSError as error:
            raise BadConfig(f"{folder}: {error.strerror}") from error
        self.folder = folder

    @classmethod
    def within(cls, folder: Path, limit_s: float) -> SpillDisk:
        """The same, but raises BadConfig too if the disk does not answer in time: a start must not wait for it. Blocking."""
        making: Future[SpillDisk] = Future()

        def make() -> None:
            try:
                making.set_result(cls(folder))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                making.set_exception(error)

        threading.Thread(target=make, name=f"open {folder}", daemon=True).start()
        try:
            return making.result(limit_s)
        except TimeoutError as error:
            making.add_done_callback(_let_go)
            raise BadConfig(f"{folder} does not answer: it was not ready within {limit_s:g} s") from error

    def _begin(self, folder: Path) -> None:
        fcntl.flock(self._boot_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        boot = host.boot_id().encode()
        if os.pread(self._boot_file, 100, 0) == boot:
            return
        folder.chmod(0o700)
        for entry in list(os.scandir(folder)):
            if MOVE_NAME.fullmatch(entry.name):
                shutil.rmtree(entry.path)
        os.pwrite(self._boot_file, boot, 0)  # all boot ids are of one length
        os.fsync(self._boot_file)
        sync_folder(folder)

    def drop(self, move: str) -> None:
        """Forgets the move at once, and removes its files in the background: a rank that is to go on must not wait for a disk
        that does not answer. The next request for room, and the start of a daemon, remove what could not be removed."""
        with self._lock:
            receiving = self._receiving.pop(move, None)
            self._sealed.pop(move, None)
            self._leftovers.discard(move)
        self.withdraw(move)
        self.known_blocks.forget(move)

        def remove() -> None:
            if receiving is not None:
                with receiving.changed:
                    receiving.closed = True
                    receiving.changed.wait_for(lambda: not receiving.writers)
            try:
                shutil.rmtree(self._directory(move))
            except FileNotFoundError:
                pass
            except OSError as error:
                log.error("the images of %s are still in %s: %s", move, self.folder, error.strerror)
                with self._lock:
                    self._undropped.add(move)

        thread = threading.Thread(target=remove, name=f"remove {move}", daemon=True)
        with self._lock:
            self._dropping = [other for other in self._dropping if other.is_alive()]
            thread.start()
            self._dropping.append(thread)

    def close(self) -> None:
        """Another daemon may use the directory. Idempotent."""
        if self._boot_file >= 0:
            os.close(self._boot_file)
            self._boot_file = -1


def _let_go(making: Future[SpillDisk]) -> None:
    """It is ready at last, too late."""
    if making.exception() is None:
        making.result().close()


class SpillingStore(ImageStore):
    """The images in memory, and those on the disk. What concerns no move concerns those in memory."""

    def __init__(
        self, image_dir: Path, disk: SpillDisk | None = None, why: str = "", *, room: Room | None = None
    ) -> None:
        """`why`: why there is no disk, although one is configured."""
        super().__init__(image_dir, room=room)
        self.disk, self.why = disk, why
        if disk is not None:  # copies of one snapshot may lie in both places, and use the same blocks
            disk.known_blocks = self.known_blocks

    def on_disk(self, move: str) -> bool:
        return self.disk is not None and move in self.disk.moves()

    def spill(self, move: str, size_bytes: int) -> bool:
        """Reserves room on the disk if there is none for so much in memory; whether it did. Raises Full if there is none at
        all."""
        if self.disk is None:
            return False
        self.dropped()
        if self.room_bytes() >= size_bytes:
            return False
        self.create_kept(move, size_bytes)
        return self.on_disk(move)

    def create_kept(self, move: str, size_bytes: int) -> None:
        """Reserves room for a move whose images are kept: in memory or, if there is none, on the disk. Raises Full."""
        try:
            self.create(move, size_bytes)
        except Full as no_memory:
            if self.disk is None:
                why = f"{no_memory.message}; {KEY} is not used: {self.why}" if self.why else no_memory.message
                raise Full(why, remedy=_REMEDY) from no_memory
            try:
                self.disk.create(move, size_bytes)
            except SnapshotError as error:
                raise Full(
                    f"in memory, {no_memory.message}; in {self.disk.folder}, {error.message}",
                    remedy=f"free memory, or space in {self.disk.folder}, on that node",
                ) from error
            log.info("the images of %s go to %s: %s", move, self.disk.folder, no_memory.message)

    def disk_room_bytes(self) -> int:
        """0: there is no disk, or it does not work."""
        try:
            return self.disk.room_bytes() if self.disk is not None else 0
        except OSError as error:
            log.error("%s cannot be used: %s", KEY, error)
            return 0

    # ------------------------------------------------------------------ where the images of a move are

    def _at(self, move: str) -> ImageStore | None:
        return self.disk if self.on_disk(move) else None

    def create(self, move: str, capacity_bytes: int, rings_bytes: int = 0) -> None:
        if (disk := self._at(move)) is not None:
            disk.create(move, capacity_bytes, rings_bytes)
        else:
            super().create(move, capacity_bytes, rings_bytes)

    def write(self, move: str, frame: Frame) -> bool:
        disk = self._at(move)
        return super().write(move, frame) if disk is None else disk.write(move, frame)

    def take(self, move: str, frame: Frame) -> Answer:
        disk = self._at(move)
        return super().take(move, frame) if disk is None else disk.take(move, frame)

    def seal(
        self, move: str, files: Sequence[ImageFile], *, sync: bool = True, synced: Callable[[int], None] = nothing
    ) -> list[str]:
        if (disk := self._at(move)) is not None:
            return disk.seal(move, files, sync=sync, synced=synced)
        return super().seal(move, files, sync=sync, synced=synced)

    def sync(self, move: str, synced: Callable[[int], None] = nothing) -> None:
        disk = self._at(move)
        return super().sync(move, synced) if disk is None else disk.sync(move, synced)

    def sealed(self, move: str) -> bool:
        disk = self._at(move)
        return super().sealed(move) if disk is None else disk.sealed(move)

    def moves(self) -> set[str]:
        return super().moves() | (self.disk.moves() if self.disk is not None else set())

    def threads(self, move: str) -> AbstractContextManager[None]:
        disk = self._at(move)
        return super().threads(move) if disk is None else disk.threads(move)

    def path(self, move: str) -> Path:
        disk = self._at(move)
        return super().path(move) if disk is None else disk.path(move)

    def drop(self, move: str) -> None:
        disk = self._at(move)
        return super().drop(move) if disk is None else disk.drop(move)

    def set_aside(self, move: str, names: Sequence[str], size_bytes: int, *, rings: bool = False) -> None:
        disk = self._at(move)
        if disk is not None:
            return disk.set_aside(move, names, size_bytes, rings=rings)
        return super().set_aside(move, names, size_bytes, rings=rings)

    def refuse(self, move: str, why: str) -> None:
        disk = self._at(move)
        return super().refuse(move, why) if disk is None else disk.refuse(move, why)

    def promise(self, move: str, untaken: Callable[[], int]) -> None:
        disk = self._at(move)
        return super().promise(move, untaken) if disk is None else disk.promise(move, untaken)

    def withdraw(self, move: str) -> None:
        super().withdraw(move)
        if self.disk is not None:
            self.disk.withdraw(move)
