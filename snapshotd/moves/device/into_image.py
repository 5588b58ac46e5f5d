"""The device memory of a rank that is snapshotted, on its way into the image.

Memory that was handed over stays on the GPU as it was at the cut. The rank gets it back, and replaces it at once by a copy of
its own, if the GPU has room for both. Then it goes on, and what it has handed over is written into stripe files. Without that
room, the files are written while the rank waits. When a file is complete it is moved into the folder of the image.

Invariant: what is saved is what the rank had at the cut: no thread of the job has run while the rank had it mapped. All
stripes are in the image's folder only when all of them are complete; until then the snapshot does not count.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence

from snapshotd.api.errors import GpuFailed, Internal, RankGone, SnapshotError
from snapshotd.inprocess import devmem
from snapshotd.moves.device import hold
from snapshotd.moves.device.memory import copy_s
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.device.source_channel import reason
from snapshotd.moves.device.stripe_room import StripeRoom
from snapshotd.moves.device.striped import Striped
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.saved import Late, Saved
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: The part of a GPU's memory that stays free beside a copy, for what the job allocates meanwhile. Up to half of it may be
#: what the job has allocated between this decision and the cut: then the copy is larger.
LEFT_FREE = 16


class IntoImage:
    """One rank. Used on the loop that made it."""

    def __init__(self, node: Node, move_log: MoveLog, room: StripeRoom) -> None:
        self._node, self._log, self._room = node, move_log, room
        self.parts = Parts()  # of what happens between the freeze and going on
        self._striped: list[Striped] = []
        self._planned_bytes = 0  # for which the GPU had room
        self._copies: list[asyncio.Task[None]] = []  # into files, while the rank waits
        self._in_files: set[str] = set()  # keys of memory that is copied
        self._shared: set[str] = set()  # keys of memory that the rank may be using
        self._saving: asyncio.Task[Saved] | None = None

    async def choose_place(self, gpu: str, wanted_bytes: int) -> None:
        """While the job runs: whether a second copy fits onto the GPU. What the job's caches have just released does not
        count as free: the job wants it back at once."""
        move = self._log.move
        inventory = await self._node.gpus.inventory(fresh=True)
        card = next((card for card in inventory.gpus if card.uuid == gpu), None)
        if card is None:
            log.warning(
                "the driver does not list GPU %s: its memory is written to host memory while the rank waits", gpu
            )
            return
        planned = sum(size for uuid, size in self._node.gpu_copies.values() if uuid == gpu)
        left_bytes = card.memory_bytes // LEFT_FREE
        kept_bytes = planned + self._node.caches_left.get(move, 0) + left_bytes
        if card.memory_free_bytes - kept_bytes >= wanted_bytes:
            self._planned_bytes = wanted_bytes + left_bytes // 2
            self._node.gpu_copies[move] = gpu, self._planned_bytes
        else:
            log.info(
                "a copy of %d MiB has no room on GPU %s (%d MiB are free): it is written to host memory while the rank waits",
                *(wanted_bytes >> 20, gpu, card.memory_free_bytes >> 20),
            )

    # ------------------------------------------------------------------ while the rank waits

    def begin(self, striped: Sequence[Striped]) -> None:
        """All of it is off the GPU's processes: in files, or handed over."""
        self._striped = list(striped)
        handed_bytes = sum(one.bytes for one in striped if one.hold is not None)
        if handed_bytes > self._planned_bytes:
            if self._planned_bytes:
                log.info("%d MiB were handed over, more than the GPU has room for", handed_bytes >> 20)
            self._no_room()
            self._copies = [asyncio.create_task(self._copy(one)) for one in striped if one.hold is not None]

    def _no_room(self) -> None:
        self._planned_bytes = 0
        self._node.gpu_copies.pop(self._log.move, None)

    async def copied(self) -> None:
        """Before the image counts as complete. Raises a SnapshotError if held memory cannot be copied to the host."""
        if self._copies:
            size = sum(one.bytes for one in self._striped)
            await self.parts.time("copy-out", asyncio.gather(*self._copies), size)

    async def _copy(self, one: Striped) -> None:
        with self._node.store.threads(self._log.move):
            await self._copy_into_files(one)

    async def _copy_into_files(self, one: Striped) -> None:
        assert one.hold is not None
        largest_bytes = max(one.sizes)
        if largest_bytes > one.stripe_bytes:  # it had more than when the files were made
            await in_thread(self._room.enlarge, one.names, one.stripe_bytes, largest_bytes)
        await one.hold.begin_whole()
        for name, size in zip(one.names, one.sizes, strict=True):
            await in_thread(os.truncate, self._room.path(name), size)
        self._in_files.add(one.hold.key)

    async def give_back(self) -> None:
        """The rank goes on: gives it its memory back, and keeps what it had handed over. Idempotent: what is back is left
        alone, and memory that is in files alone is for others to bring back. Raises as `hold.take_back`."""
        if self._planned_bytes:
            began = host.boottime_s()
            given = await asyncio.gather(*(self._give(one) for one in self._striped), return_exceptions=True)
            for failed in given:
                if isinstance(failed, BaseException):
                    raise failed
            if any(given):
                self.parts.add("give-back", host.boottime_s() - began, sum(one.bytes for one in self._striped))

    async def _give(self, one: Striped) -> bool:
        """False: there was nothing to give."""
        process = one.process
        if one.hold is None or not process.alive() or not await in_thread(devmem.is_out, process):
            return False
        key = one.hold.key
        numbers = process, len(one.names), one.slot_bytes, copy_s(one.bytes)
        self._shared.add(key)
        try:
            await in_thread(hold.give, self._node.holder, key, *numbers, keep=True)
            await reach(Point.TAKEN_BACK)
            await in_thread(hold.own, *numbers)
            if await in_thread(hold.imports, process):
                copied = await self._copy_after_all(one, key)
                await in_thread(hold.own, *numbers)
                if not copied:  # what the rank writes from now on may be in what is still kept
                    return True
        except RankGone:  # it could not change anything
            log.info("process %d has ended: no device memory has to come back to it", process.pid)
        self._shared.discard(key)
        return True

    async def _copy_after_all(self, one: Striped, key: str) -> bool:
        """The GPU has no room for both after all: writes the memory to the host, and leaves it to the rank. False if it could
        not be written. Never fails: the rank is stopped, and whatever the reason is, it goes on, and the snapshot does not
        count."""
        pid, copied = one.process.pid, True
        log.warning("the GPU has no room for a copy of the memory of process %d: the rank waits for it", pid)
        try:
            await self._copy(one)
        except Exception as error:  # noqa: BLE001 - no file can be written, the copier was lost, or answers nonsense
            copied = False
            log.error("the device memory of process %d cannot be copied: %r", pid, reason(error))
        try:
            await in_thread(self._node.holder.drop, [key])
        except (SnapshotError, OSError) as error:  # it is dropped when the snapshot ends
            log.error("the GPU still has the former memory of process %d: %s", pid, reason(error))
        return copied

    # ------------------------------------------------------------------ while the rank runs again

    def save_soon(self) -> None:
        """Once: the rank goes on."""
        if self._saving is None:
            self._saving = asyncio.create_task(self._save(), name=f"save device memory of {self._log.move}")
            self._node.saving[self._log.move, Late.DEVICE] = self._saving

    async def _save(self) -> Saved:
        began, size = host.boottime_s(), sum(one.bytes for one in self._striped)
        try:
            await reach(Point.SAVING)
            await self._save_all()
            await reach(Point.SAVED)
            failure = ""
        except (SnapshotError, OSError) as error:
            failure = str(reason(error))
            log.error("the device memory of rank %s is not saved: %s", self._log.begin.rank, failure)
        finally:
            self._no_room()
            await asyncio.gather(*(one.hold.close() for one in self._striped if one.hold is not None))
        await in_thread(self._room.give_up)
        return Saved(size, host.boottime_s() - began, failure)

    async def _save_all(self) -> None:
        if self._shared:
            raise GpuFailed("the rank went on before it was copied")
        late = [one for one in self._striped if one.hold is not None and one.hold.key not in self._in_files]
        await asyncio.gather(*(self._copy(one) for one in late))
        await in_thread(hold.let_go, self._node.holder, self._log.move)
        with self._node.store.threads(self._log.move):
            await in_thread(self._move_files)

    def _move_files(self) -> None:
        folder = self._node.store.path(self._log.move)
        for one in self._striped:
            for name, size in zip(one.names, one.sizes, strict=True):
                if (found := self._room.path(name).stat().st_size) != size:
                    raise Internal(f"{name} has {found} bytes, {size} were copied")
        moved = [name for one in self._striped for name in one.names]
        if self._room.folder.stat().st_dev != folder.stat().st_dev:  # they are in memory, and the image is on a disk
            for name in moved:
                shutil.copyfile(self._room.path(name), folder / f".{name}")
                (folder / f".{name}").chmod(0o600)
            for name in moved:
                (folder / f".{name}").rename(folder / name)
        else:
            for name in moved:
                self._room.path(name).rename(folder / name)
        self._room.remove()

    async def close(self) -> None:
        """Stops copying. Idempotent."""
        tasks: list[asyncio.Task[None] | asyncio.Task[Saved]] = [*self._copies]
        if self._saving is not None:
            tasks.append(self._saving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._node.saving.pop((self._log.move, Late.DEVICE), None)
        self._no_room()
