"""Offloads device memory before the driver's checkpoint: into stripe files on this node, which are sent while they grow.

The files, the device-memory channel to the target, and the pinned staging buffers in each process are prepared while the
job still runs. Then, with every thread of the job parked and all its work done, the driver is unlocked once more, so that the
shim's own threads can copy; it is locked again for the checkpoint of the small rest.

Invariant: as long as nothing is off the GPU, a failure here only means that the driver's checkpoint carries the memory,
more slowly. What is off the GPU is in the stripe files, or kept by the holder, and `refill` brings it back. Which processes
have files is journalled before the first of them gets one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from snapshotd.api.errors import Full, RankGone, SnapshotError, Unreachable, Where, WrongState
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess.devmem import Caught, TooSmall
from snapshotd.inprocess.holding import CannotExport
from snapshotd.moves.device import checkpoint_room, sharing, standstill, stripe_files
from snapshotd.moves.device.hold import Hold
from snapshotd.moves.device.into_image import IntoImage
from snapshotd.moves.device.memory import copy_s
from snapshotd.moves.device.parts import Parts, each
from snapshotd.moves.device.source_channel import SourceChannel, reason
from snapshotd.moves.device.standstill import LOCK_S
from snapshotd.moves.device.stripe_room import StripeRoom
from snapshotd.moves.device.striped import Striped, candidates, drop_holds, prepare_holds
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import OffloadedMemory, StripedProcess
from snapshotd.moves.rules import Mark
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.transport.device import ring

log = logging.getLogger(__name__)

#: A thread that was parked inside an allocation or a CUDA call soon leaves it, but each attempt may wait for the GPU.
TRIES, AGAIN_S = 3, 0.01
#: How often the senders are updated on the progress of the copy.
FEED_S = 0.002


class Offload:
    """The offloaded device memory of one move on its source. A restart may lose all but the files and the journal."""

    def __init__(
        self, node: Node, move_log: MoveLog, striped: list[Striped], preflight_bytes: int, gpus: Sequence[str] = ()
    ) -> None:
        """`gpus`: those that the rank uses. If there is only one, its memory can be handed over."""
        self.node, self.log, self._gpus = node, move_log, list(gpus)
        self.striped = striped
        self.names = [name for one in striped for name in one.names]
        self.warnings: list[str] = []
        self.channel = SourceChannel(node, move_log, self.names, self._warn)
        #: If the processes cannot be asked, the bytes that preflight saw.
        self._wanted_bytes = sum(one.expected_bytes for one in striped) or preflight_bytes
        self._no_hold = ""  # why memory that should stay on its GPU cannot
        self._target_is_full = ""  # why it has no room for the whole device memory
        self._room = StripeRoom(node, move_log.move, len(self.names))
        #: Of a snapshot: it stays here, and the rank goes on.
        self.into_image = IntoImage(node, move_log, self._room) if move_log.begin.kind == "snapshot" else None
        self._copies: list[asyncio.Task[None]] = []
        self._announcing: asyncio.Task[None] | None = None

    @property
    def folder(self) -> Path:
        """Of the stripe files."""
        return self._room.folder

    @property
    def expected_bytes(self) -> int:
        """What will be offloaded, as far as it is known yet."""
        return sum(one.expected_bytes for one in self.striped)

    # ------------------------------------------------------------------ while the job runs

    async def prepare(self) -> None:
        """Prepares offloading. Never fails: if it is not possible, the driver's checkpoint carries all memory."""
        try:
            await self._prepare()
        except (SnapshotError, OSError) as error:
            await self.give_up(error)

    async def _prepare(self) -> None:
        suspends = self.log.begin.coordinator and self.into_image is None  # into files: nothing stays on the GPU
        holds = self.node.config.hold_device_memory and len(self._gpus) == 1 and not suspends
        if holds and await self._prepare_to_hold():
            return
        await self._journal()
        await in_thread(partial(self._room.place, beside_image=False))
        await in_thread(self._room.make_folder)
        try:  # first: the target may have reserved memory for rings only, and for an image without device memory
            await self.channel.open(self.expected_bytes)
        except Full as full:
            self._target_is_full = full.message
            raise
        await self._room.make_files(self._files)
        await all_at_once(self._ready, self.striped)

    async def _journal(self) -> None:
        striped = [
            StripedProcess(
                *(one.process.pid, one.process.start_ticks, one.names, one.slot_bytes),
                held=one.hold is not None,
                taken_over=self.channel.takes_over,
            )
            for one in self.striped
        ]
        await in_thread(self.log.mark, self.log.last_mark, striped_processes=striped)

    async def _prepare_to_hold(self) -> bool:
        """Prepares the memory to stay on its GPU until it is sent. False if it has to go through files, with a warning unless
        the program has created memory that cannot be exported."""
        heard = len(self.warnings)
        try:
            await in_thread(partial(self._room.place, beside_image=self.into_image is not None))
            await in_thread(self._room.make_folder)
            await in_thread(self.node.holder.start, self.log.move)
            if self.into_image is not None:
                await self._room.make_files(self._files)
            else:
                offers = self.node.config.hand_over_device_memory
                holder = await in_thread(Process.of, self.node.holder.pid) if offers else None
                self.channel.hold(self.striped[0].slot_bytes, self._gpus[0], holder)
                await self.channel.open(self.expected_bytes)
                if not self.channel.works:
                    raise Unreachable("there is no device-memory channel")
                if not self.channel.takes_over:
                    await self._room.make_files([(name, ring.FILE_BYTES) for name in self.names])
            for one in self.striped:
                place = self._gpus[0], self.folder, one.names, one.slot_bytes
                whole = self.into_image is not None
                one.hold = await in_thread(Hold, self.node, self.log.move, one.process, *place, whole=whole)
            await self._journal()
            await prepare_holds(self.striped, sends=not self.channel.takes_over)
            if self.into_image is not None:  # the processes that copy take some memory there
                await self.into_image.choose_place(self._gpus[0], self.expected_bytes)
        except (SnapshotError, OSError, CannotExport) as error:
            self._no_hold = str(reason(error))
            text = f"device memory goes through files on this node: {self._no_hold}"
            if isinstance(error, CannotExport) or self.warnings[heard:]:
                del self.warnings[heard:]  # of the channel, which warns again when it is opened again
                log.info("%s", text)
            else:
                self._warn(text)
            await drop_holds(self.striped)
            await self.channel.close()
            self.channel.hold(0, "")
            await in_thread(self._room.give_up)
            return False
        return True

    async def reopen_channel(self) -> None:
        """Replaces a channel that broke while the job was advancing to its cut; nothing was sent yet. Raises Unreachable if
        there is none any more, and held memory, which cannot follow the image, needs one."""
        await self.channel.reopen(self.expected_bytes)
        if self.holds and self.into_image is None and not self.channel.works:
            raise Unreachable(
                f"the device-memory channel broke before the rank was frozen: {'; '.join(self.warnings)}",
                remedy="the rank keeps running; a plain retry is safe",
                where=Where.SOURCE_RUNNING,
            )

    @property
    def _files(self) -> list[tuple[str, int]]:
        return [(name, one.stripe_bytes) for one in self.striped for name in one.names]

    def _ready(self, one: Striped) -> None:
        with stripe_files.opened(self.folder, one.names, os.O_RDWR) as fds:
            one.memory.ready(fds, one.slot_bytes)

    def must_fit(self, pid: int, where: Where) -> None:
        """Reserves host memory for what the driver's checkpoint has to carry: that becomes the job's own memory, and
        preflight checked for less. Blocking. Raises Full, also if the target has no room for it."""
        left_bytes = self._wanted_bytes - sum(one.expected_bytes for one in self.striped)
        if left_bytes > 0 and self._target_is_full:
            why = f" ({self._no_hold})" if self._no_hold else ""
            text = f"device memory goes through files{why}, and the target has no room for it: {self._target_is_full}"
            raise Full(text, where=where)
        if left_bytes > 0:
            why = f"device memory cannot be offloaded ({'; '.join(self.warnings)}), and"
            checkpoint_room.reserve(self.node, self.log.move, pid, left_bytes, why, where)

    # ------------------------------------------------------------------ while the job is at a standstill

    async def out(
        self, gpus: Gpus, held: Sequence[Process], parts: Parts, stop_others: Callable[[], Awaitable[None]]
    ) -> int:
        """Moves the striped memory off the GPU; returns the bytes. The processes are at a standstill before and after.
        `stop_others` stops processes that one of them has forked while its threads were released.

        If it fails, some memory may be off the GPU: the driver aborts, and the undo refills.
        """
        for one in [one for one in self.striped if one.process not in held]:  # it has ended, or uses no GPU any more
            self._wanted_bytes -= one.expected_bytes
            self.striped.remove(one)
            if one.hold is not None:
                await one.hold.close()
        if not self.striped:  # `must_fit` was checked before the standstill
            self.channel.announce_sizes()  # no bytes: the target need not wait
            return 0
        unlocked = [one.process for one in self.striped]
        left = list(self.striped)
        for again in range(TRIES):
            if again:
                await self._let_go_and_hold(gpus, left, parts)
                await stop_others()
            await parts.time("unlock", each([one.process for one in left], lambda one: gpus.unlock(one, LOCK_S)))
            if not (left := await self._copy(left, parts)):
                break
            await sharing.must_stay_parked(held)
        if left:  # a call that a parked thread blocks returns only once it is released; then everything can be given up
            await self._let_go_and_hold(gpus, left, parts, drop=True)
            await stop_others()
            unlocked = [process for process in unlocked if process not in {one.process for one in left}]
        for one in left:
            await self._leave_to_driver(one, f"{TRIES} times in a row {one.caught}")
        offloaded = [OffloadedMemory(one.inner_pid, one.names, one.sizes, one.slot_bytes) for one in self.striped]
        size = sum(one.bytes for one in self.striped)
        handed_bytes = size if self.channel.takes_over else 0
        await in_thread(
            self.log.mark, Mark.FREEZING, offloaded=offloaded, offloaded_bytes=size, handed_over_bytes=handed_bytes
        )
        self._announcing = asyncio.create_task(self._announce_sizes(), name=f"announce stripes of {self.log.move}")
        if self.into_image is not None:
            self.into_image.begin(self.striped)
        await reach(Point.OFFLOADED)
        await in_thread(self.must_fit, held[0].pid, Where.SOURCE_FROZEN)
        await parts.time("relock", each(unlocked, lambda one: gpus.lock(one, LOCK_S)))
        return size

    async def _let_go_and_hold(
        self, gpus: Gpus, caught: Sequence[Striped], parts: Parts, *, drop: bool = False
    ) -> None:
        """Releases and parks only these: the others' memory is off the GPU. The rest of the tree stays stopped."""
        processes = [one.process for one in caught]
        reasons = "; ".join(f"process {one.process.pid}: {one.caught}" for one in caught)
        log.info("releasing threads to try again: %s", reasons)
        await standstill.let_go(processes)
        await asyncio.sleep(AGAIN_S)
        if drop:
            await all_at_once(lambda one: one.memory.drop(), caught)
        await standstill.still(gpus, processes, processes, parts)

    async def _copy(self, wanted: Sequence[Striped], parts: Parts) -> list[Striped]:
        """Returns those with a thread parked inside an allocation. The others are off the GPU, or left to the driver."""
        began = host.boottime_s()
        feeding = asyncio.create_task(self._feed(wanted))
        limit_s = copy_s(sum(one.expected_bytes for one in wanted))
        try:
            results = await asyncio.gather(
                *(all_at_once(lambda one: self._copy_one(one, limit_s), [one]) for one in wanted),
                return_exceptions=True,
            )
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        caught = []
        for one, result in zip(wanted, results, strict=True):
            if isinstance(result, Caught):
                one.caught = str(result)
                caught.append(one)
            elif isinstance(result, BaseException):
                await self._failed(one, result)
            else:
                one.sizes = one.hold.sizes if one.hold is not None else list(await in_thread(one.memory.done))
                if one.hold is not None and self.into_image is None:
                    self._copies += await one.hold.pass_on(self.channel, one.inner_pid)
                elif one.hold is None:
                    self.channel.advance(one.names, one.sizes)
        parts.add("offload", host.boottime_s() - began, sum(one.bytes for one in wanted))
        return caught

    def _copy_one(self, one: Striped, limit_s: float) -> int:
        """Enlarges the files if the process, which ran since it was measured, has more memory by now. Blocking."""
        if one.hold is not None:
            return one.hold.hand_over(limit_s)
        try:
            return one.memory.offload(limit_s)
        except TooSmall as small:
            before_bytes = one.stripe_bytes
            self._wanted_bytes += max(0, small.total_bytes - one.expected_bytes)
            one.expected_bytes = max(one.expected_bytes, small.total_bytes)
            self._room.enlarge(one.names, before_bytes, small.largest_bytes)
            return one.memory.offload(limit_s)

    async def _failed(self, one: Striped, error: BaseException) -> None:
        """A failure is harmless while the memory is still on the GPU; otherwise it is raised."""
        if not isinstance(error, SnapshotError) or isinstance(error, RankGone):
            raise error
        await all_at_once(lambda memory: memory.cancel(), [one.memory])
        if await in_thread(one.memory.offloaded):
            raise error
        await self._leave_to_driver(one, error.message)

    async def _leave_to_driver(self, one: Striped, why: str) -> None:
        """Empties the files of a process, which are not needed any more: the driver's copy needs the room."""
        if one.hold is not None:
            await one.hold.close()
            await in_thread(self.node.holder.drop, [one.hold.key])  # what it had handed over when it failed
        await all_at_once(Striped.drop, [one])
        self.striped = [other for other in self.striped if other is not one]
        if not self.channel.takes_over:  # else it has none
            await all_at_once(stripe_files.empty, [self.folder / name for name in one.names])
        self._warn(f"the driver's checkpoint carries the device memory of process {one.inner_pid}: {why}")

    async def _feed(self, wanted: Sequence[Striped]) -> None:
        """Keeps the senders informed of the progress of the copy."""
        while True:
            await asyncio.sleep(FEED_S)
            for one in [one for one in wanted if one.hold is None]:
                with contextlib.suppress(SnapshotError):  # the caller that waits for the copy gets the error
                    self.channel.advance(one.names, await in_thread(one.memory.done))

    async def _announce_sizes(self) -> None:
        """Once all is copied. If held memory cannot be copied, nothing more is sent, and the move is undone."""
        try:
            if self._copies:
                await asyncio.gather(*self._copies)
            self.channel.announce_sizes()
        except SnapshotError as error:
            self._warn(f"held device memory cannot be copied: {error.message}")
            await self.channel.close()

    # ------------------------------------------------------------------ on its way, and afterwards

    @property
    def has_channel(self) -> bool:
        return self.channel.works

    @property
    def holds(self) -> bool:
        """Whether the memory is in no files that could follow the image."""
        return any(one.hold is not None for one in self.striped)

    @property
    def sent_bytes(self) -> int:
        return self.channel.sent_bytes if self.striped else 0

    async def finish(self) -> int:
        """COMMIT stands, so everything has arrived: closes the channel and returns the bytes that were sent."""
        sent = await self.channel.finish()
        await self.close()
        return sent

    async def give_up(self, why: SnapshotError | OSError) -> None:
        """Stripes nothing: removes the files, the channel, and what was prepared in the processes."""
        self._warn(f"the driver's checkpoint carries the device memory: {reason(why)}")
        striped, self.striped = self.striped, []
        await self.channel.give_up()
        await asyncio.gather(*(one.hold.close() for one in striped if one.hold is not None))
        await asyncio.gather(*(all_at_once(Striped.drop, [one]) for one in striped))
        await in_thread(self._room.remove)
        await in_thread(self._room.give_up)

    async def close(self) -> None:
        """Stops sending; the files stay. Idempotent."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        if self.into_image is not None:
            await self.into_image.close()
        await asyncio.gather(*(one.hold.close() for one in self.striped if one.hold is not None))
        await self.channel.close()
        await in_thread(self._room.give_up)

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self.warnings.append(text)


async def prepare(
    node: Node, move_log: MoveLog, processes: Sequence[Process], preflight_bytes: int, gpus: Sequence[str] = ()
) -> Offload | None:
    """Prepares the device memory of these running processes to leave in stripes; None where there is too little of it.
    Raises WrongState when some of it is off the GPU already, and the processes do not run."""
    try:
        striped = await in_thread(candidates, processes)
    except WrongState:
        raise
    except (SnapshotError, OSError) as error:
        offload = Offload(node, move_log, [], preflight_bytes)
        await offload.give_up(error)
        return offload
    if not striped:
        return None
    offload = Offload(node, move_log, striped, preflight_bytes, gpus)
    await offload.prepare()
    return offload
