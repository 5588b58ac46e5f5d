"""The images of suspended ranks and of snapshots on this node: describes them, sends them to the targets of a resumption or
to a buddy, drops them.

Invariant: an image is dropped only if the coordinator says that it is not needed any more (the job runs again, or has a newer
snapshot, or has ended), or an operator gives it up. Sending one changes nothing: it can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    Damaged,
    Denied,
    GpuFailed,
    NotFound,
    Undone,
    Usage,
    Where,
    WrongState,
)
from snapshotd.moves import description
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.home_keepers import HomeKeepers
from snapshotd.moves.jobs.pacing import Pacing
from snapshotd.moves.jobs.sending import Sending, readable, size_bytes
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.moves.saved import Late
from snapshotd.moves.steps import step
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.transport.image.stall import of_disk

log = logging.getLogger(__name__)

#: How often to look whether a disk works.
LOOK_S = 1.0


class StoredImages:
    """One instance per daemon."""

    def __init__(self, node: Node, home_keepers: HomeKeepers) -> None:
        self.node, self.home_keepers = node, home_keepers
        self._facts: dict[str, pb.RankFacts] = {}  # by move; they do not change
        self._sizes_bytes: dict[str, int] = {}  # … nor do these
        self._pacing = Pacing()
        self._signing = WeakValueDictionary[str, asyncio.Lock]()  # by move

    def adopt(self) -> None:
        """At start: drops what a crash left of images that were never whole, or were given up. A whole image of which the
        journal knows nothing stays: it may be all that is left of a rank. Blocking."""
        for move in self.node.suspended.moves():
            move_log = self.node.journal.find(move)
            if move_log is None and self.node.suspended.sealed(move):
                log.warning(
                    "the journal does not know the image %s of a suspended rank, so it can neither be resumed nor dropped;"
                    " delete %s by hand if it is of no use",
                    move,
                    self.node.suspended.path(move),
                )
                continue
            unfinished = move_log is not None and move_log.last_mark is not Mark.SETTLED
            if move_log is None or not (unfinished or self._kept(move_log)):
                self.node.suspended.drop(move)
        for move in self.node.store.moves():
            move_log = self.node.journal.find(move)
            if move_log is None:
                unneeded = self.node.store.on_disk(move)  # a crash before it was journalled
            else:
                is_snapshot = bool(move_log.begin.kind)  # else a rank was restored from it, and that has ended
                unneeded = bool(move_log.ended_unix_s) and not (is_snapshot and self._kept(move_log))
            if unneeded:
                self.node.store.drop(move)
        self.node.kept_files.sweep(self._needs_files)

    def _needs_files(self, move: str) -> bool:
        move_log = self.node.journal.find(move)
        return move_log is not None and (not move_log.ended_unix_s or self._kept(move_log))

    def _kept(self, move_log: MoveLog) -> bool:
        return bool(move_log.begin.coordinator and move_log.committed and not move_log.whole().dropped)

    def of_snapshots(self) -> list[MoveLog]:
        """The moves whose images are kept here for snapshots of their jobs."""
        found = [self.node.journal.find(move) for move in sorted(self.node.store.moves())]
        return [one for one in found if one is not None and one.begin.kind and one.committed and one.ended_unix_s]

    async def ranks(self) -> list[pb.Rank]:
        """The suspended ranks whose images are here. One whose description is damaged is listed as the journal knows it: the
        other ranks of this node must be seen."""
        found = []
        for move in sorted(self.node.suspended.moves()):
            move_log = self.node.journal.find(move)
            if move_log is not None and move_log.committed and move_log.last_mark is Mark.SETTLED:
                rank = pb.Rank()
                try:
                    rank.CopyFrom((await self._facts_of(move_log)).rank)
                except Damaged as error:
                    log.error("%s", error.message)
                    begin = move_log.begin
                    user_id = max(begin.user_id, 0)
                    rank = pb.Rank(uid=begin.rank_uid, job=begin.job, rank=begin.rank, user_id=user_id)
                rank.memory_bytes = await self._size_of(move)
                rank.place, rank.at_node, rank.moving = pb.Rank.SUSPENDED, self.node.config.node, ""
                rank.ClearField("process")
                found.append(rank)
        return found

    async def describe(self, image: str) -> pb.StoredImage:
        """Raises Unreadable if what is needed of it cannot be read."""
        move_log = await self._image(image)
        rewires = (await in_thread(move_log.whole)).rewires
        with readable(move_log, OSError, Damaged):
            if move_log.begin.kind == "copy":
                store = self.node.store_of(move_log.begin)
                with store.threads(image):
                    rewires = (await in_thread(_description, store.path(image))).rewires
            facts = await self._facts_of(move_log)
        return pb.StoredImage(facts=facts, rewires=rewires, bytes=await self._size_of(image))

    async def send(self, request: pb.SendRequest) -> AsyncIterator[pb.Progress]:
        """Sends an image to the target of a resumption, or to a buddy; yields progress. The image stays. It may be sent to
        several buddies at the same time. Raises Unreadable if the image cannot be read, and Timeout if nothing is done any
        more."""
        if request.only_wait:
            parts = await self._saved(request.image)
            await self._image(request.image)
            yield pb.Progress(done=True, parts=parts)
            return
        check_move_id(request.move)
        parts = await self._saved(request.image)
        move_log = await self._image(request.image)
        if len(request.nonce) < 16 or not request.target_node or not request.target_endpoint:
            raise Usage("an image is sent with the target's nonce, to a node and its endpoint")
        parts += await self._synced(move_log)
        await reach(Point.BEFORE_SEND)
        sending = Sending(
            self.node, move_log, request, self._pacing, self._signing.setdefault(request.image, asyncio.Lock())
        )
        task = asyncio.create_task(sending.run(), name=f"send {request.image}")
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.1)
                sending.look()
                yield sending.progress()
            await task
        finally:  # a driver that is gone has given the attempt up
            task.cancel()
            if sending.stalled:  # a disk that does not answer keeps a thread, and nothing waits for that
                task.add_done_callback(_seen)
            else:
                await asyncio.gather(task, return_exceptions=True)
        await reach(Point.SEND)
        last = sending.progress(done=True)
        last.parts.extend([*parts, *sending.waited])
        yield last

    def hurry(self, image: str) -> bool:
        """Something waits for the copy of this image: it is sent without a limit from now on. False: it is not being sent."""
        return self._pacing.lift(check_move_id(image))

    async def _saved(self, image: str) -> list[pb.Part]:
        """Waits until all memory of a snapshot is in its image. Raises GpuFailed if its device memory never will be, Undone
        if memory of the host never will be, and WrongState if the snapshot is given up meanwhile."""
        parts = []
        for late in Late:
            if (saving := self.node.saving.get((image, late))) is None:
                continue
            await asyncio.wait([saving])
            is_first = self.node.saving.pop((image, late), None) is not None  # of several buddies
            if saving.cancelled():
                raise WrongState("the snapshot was given up", where=Where.UNTOUCHED)
            saved = saving.result()
            if saved.failure and late is Late.DEVICE:
                raise GpuFailed(
                    f"the device memory of the rank is not in the image: {saved.failure}", where=Where.UNTOUCHED
                )
            if saved.failure:
                raise Undone(
                    f"memory of the rank is not in the image: {saved.failure}",
                    remedy="the rank goes on; a plain retry is safe",
                    where=Where.UNTOUCHED,
                )
            if is_first:
                parts.append(pb.Part(name=late, seconds=saved.seconds, bytes=saved.bytes))
        return parts

    async def _synced(self, move_log: MoveLog) -> list[pb.Part]:
        """The image of a snapshot does not count before a disk has said that it has it. Raises Full or Internal."""
        if move_log.begin.kind != "snapshot" or move_log.committed or not self.node.store.on_disk(move_log.move):
            return []
        began_s = host.boottime_s()
        await self._until_synced(move_log.move)
        bytes_ = await self._size_of(move_log.move)
        return [pb.Part(name="sync", seconds=host.boottime_s() - began_s, bytes=bytes_)]

    async def _until_synced(self, move: str) -> None:
        """A disk that has stalled keeps a thread, and nothing waits for that."""
        stall, synced_bytes = of_disk(self.node.config.node), 0

        def synced(size_bytes: int) -> None:
            nonlocal synced_bytes
            synced_bytes += size_bytes

        with self.node.store.threads(move):
            syncing = asyncio.create_task(in_thread(self.node.store.sync, move, synced), name=f"sync {move}")
        syncing.add_done_callback(_seen)
        while not (await asyncio.wait([syncing], timeout=LOOK_S))[0]:
            stall.look(synced_bytes)
        await syncing

    @step
    async def drop(
        self, image: str, reason: str, by_node: str, *, given_up: bool = False, ended: str = ""
    ) -> pb.DropImageReply:
        """Drops an image, for the coordinator's node or an operator. Idempotent. `given_up`: the rank never runs again, and
        its home keeper ends, so that its launcher notices it. `ended`: the records that have ended copies of the rank."""
        check_move_id(image)
        move_log = self.node.journal.find(image)
        if move_log is None or image not in self.node.store_of(move_log.begin).moves():
            return pb.DropImageReply()
        coordinator = (await in_thread(move_log.whole)).successor_node or move_log.begin.coordinator_node
        if by_node and by_node != coordinator:
            raise Denied(f"{by_node} is not the coordinator of {image}")
        self._must_be_suspended(move_log)
        store = self.node.store_of(move_log.begin)
        if given_up:
            with store.threads(image):
                await in_thread(self.home_keepers.remember, store.path(image), move_log, ended)
        await in_thread(move_log.mark, Mark.SETTLED, dropped=reason or "dropped")
        await in_thread(self.node.kept_files.drop, image)
        await in_thread(store.drop, image)
        if given_up:
            self.home_keepers.end(move_log)
        self._facts.pop(image, None)
        self._sizes_bytes.pop(image, None)
        log.info("dropped the image of rank %s: %s", move_log.begin.rank_uid, reason)
        return pb.DropImageReply()

    async def _image(self, image: str) -> MoveLog:
        """The move of a suspended rank, or of a snapshot, whose image is here. Raises NotFound or WrongState. That of a
        snapshot may be sent to its buddy before it counts."""
        move_log = self.node.journal.find(check_move_id(image))
        if (
            move_log is None
            or not move_log.begin.coordinator
            or not await self._is_whole(move_log)
            or (move_log.begin.role == "target" and move_log.begin.kind != "copy")
        ):
            raise NotFound(
                f"node {self.node.config.node} has no image {image}", remedy="`migrator job list` shows suspended jobs"
            )
        if move_log.begin.kind == "snapshot" and move_log.known.continued and not move_log.aborted:
            return move_log
        self._must_be_suspended(move_log)
        return move_log

    async def _is_whole(self, move_log: MoveLog) -> bool:
        store = self.node.store_of(move_log.begin)
        with store.threads(move_log.move):
            return await in_thread(stored.is_whole, store, move_log)

    def _must_be_suspended(self, move_log: MoveLog) -> None:
        """Raises WrongState while the rank still has a process."""
        if not move_log.committed or move_log.last_mark is not Mark.SETTLED:
            raise WrongState(
                f"rank {move_log.begin.rank} of job {move_log.begin.job} is not suspended yet",
                remedy="wait until `migrator job list` shows the job as suspended",
                where=Where.UNKNOWN,
            )

    async def _size_of(self, move: str) -> int:
        """Bytes on the disk; 0 if the files are gone."""
        if (known := self._sizes_bytes.get(move)) is None:
            try:
                store = self.node.store_of(self.node.journal.get(move).begin)
                folder = store.path(move)
                with store.threads(move):
                    known = await in_thread(lambda: size_bytes(folder.iterdir()))
            except (OSError, NotFound) as error:
                log.error("the image of %s cannot be read: %s", move, error)
                return 0
            self._sizes_bytes[move] = known
        return known

    async def _facts_of(self, move_log: MoveLog) -> pb.RankFacts:
        if (known := self._facts.get(move_log.move)) is None:
            known = self._facts[move_log.move] = await in_thread(stored.facts_of, move_log)
        return known


def _seen(task: asyncio.Task[None]) -> None:
    """The caller gets the failure, if it still waits."""
    if not task.cancelled():
        task.exception()


def _description(folder: Path) -> ImageDescription:
    return description.decode((folder / description.FILE).read_bytes())
