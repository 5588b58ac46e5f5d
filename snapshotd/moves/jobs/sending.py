"""Sends one image that is kept here: to a target of a resumption, or to a buddy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, SnapshotError, Timeout, Unreadable, Where
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.moves.device import stripe_files
from snapshotd.moves.jobs import made_image, stored
from snapshotd.moves.jobs.pacing import Pacing
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.sink import TargetSink
from snapshotd.net import link_speed
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.stall import Stall
from snapshotd.transport.image.stream import Stream

#: Files that a target only reads (`criu.layers.is_shared`).
_PAGES = re.compile(r"(ahead-)?pages-[0-9-]{1,40}\.img")

log = logging.getLogger(__name__)


class Sending:
    """One image on its way."""

    def __init__(
        self,
        node: Node,
        move_log: MoveLog,
        request: pb.SendRequest,
        pacing: Pacing,
        signing: asyncio.Lock | None = None,
    ) -> None:
        """`signing`: held while the image is signed, which is done for all its buddies together."""
        self.signing = signing or asyncio.Lock()
        self.node, self.log, self.request, self.pacing = node, move_log, request, pacing
        self.is_copy = not move_log.committed  # to a buddy, while the rank runs; else to resume the job
        self.waited: list[pb.Part] = []  # for the limit of copies
        self.folder = node.store_of(move_log.begin).path(move_log.move)
        self.sender: Sender | None = None
        self.expected_bytes = 0
        self.began_s = host.boottime_s()
        self.checked_bytes = 0  # compared with what was signed
        self.linked_bytes = 0  # of pages, which the target reads, and does not get
        self.sealing = self.stalled = False
        self._stall = Stall(
            f"{node.config.node} has sent nothing of the image {move_log.move} to {request.target_node}"
        )

    def look(self) -> None:
        """Raises Timeout if nothing is done any more, to have the image sent by another node: the disk that it is read from
        may not answer. Not for what waits for the target's disk, which is watched as well (`TargetSink.seal`), and not for an
        image that only this node has, nor for one on its way to a buddy."""
        if self.is_copy or self.sealing or not self.log.begin.kind:
            return
        sent = self.progress()
        done_bytes = sent.bytes_sent + sent.bytes_zero + sent.bytes_found + self.expected_bytes + self.checked_bytes
        try:
            self._stall.look(done_bytes)
        except Timeout as error:
            self.stalled = True
            log.error("rank %s: %s", self.log.begin.rank_uid, error.message)
            raise

    def progress(self, *, done: bool = False) -> pb.Progress:
        return pb.Progress(
            bytes_sent=self.sender.bytes_sent if self.sender is not None else 0,
            bytes_zero=self.sender.bytes_zero if self.sender is not None else 0,
            bytes_found=self.sender.bytes_found if self.sender is not None else 0,
            bytes_expected=self.expected_bytes,
            done=done,
            stream_seconds=host.boottime_s() - self.began_s,
        )

    async def run(self) -> None:
        with self.node.store_of(self.log.begin).threads(self.log.move):
            await self._run()

    async def _run(self) -> None:
        request = self.request
        sink = TargetSink(self.node, self._begin(), go_last=self.is_copy)
        with readable(self.log, OSError, Unreadable):
            files = await in_thread(stored.verified, self.folder, self.log)
            sink.made = await in_thread(made_image.load, self.log)
            if request.target_node == self.node.config.node:
                await self._must_be_whole(sink.made, files)
        if request.target_node == self.node.config.node:
            files = await in_thread(self._link, files)  # into the target's folder: that may have no room
        with readable(self.log, OSError, Unreadable):
            # Assigned once: `look` would take a smaller value for a stall.
            self.expected_bytes = await in_thread(size_bytes, files)
        async with self._signed(files) as signed:
            await self._send(sink, files, signed)
        log.info("sent the image of rank %s to %s", self.log.begin.rank_uid, request.target_node)

    async def _send(self, sink: TargetSink, files: Sequence[Path], signed: asyncio.Task[pb.MadeImage] | None) -> None:
        request = self.request
        offers, chunk_bytes = request.offer_blocks, self.node.config.chunk_bytes
        async with (
            self._streams(sink) as streams,
            Sender(streams, chunk_bytes, offers=offers, node=request.target_node) as self.sender,
        ):
            with readable(self.log, Unreadable):
                for path in files:
                    await self.sender.put_file(path.name, path)
            sent = await self.sender.finish()
        self.sealing = True
        if self.log.ended_unix_s:
            # Before the target can answer that its copy runs: this node confirms then that the rank is there.
            node, endpoint = request.target_node, request.target_endpoint
            await in_thread(self.log.mark, Mark.SETTLED, resumed_node=node, resumed_endpoint=endpoint)
        if signed is not None:
            sink.made = await signed
        with self._room_for_linked():
            damaged = await sink.seal(sent)
        if damaged:
            raise Damaged(f"these images arrived damaged: {', '.join(damaged)}", where=Where.UNKNOWN)

    @contextlib.contextmanager
    def _room_for_linked(self) -> Iterator[None]:
        """What is reserved for an image ends with its seal. Of one whose pages were linked the restored rank still needs as
        much. Ends with its restore, or with its image."""
        store, move = self.node.store, self.request.move
        if self.linked_bytes:
            store.promise(move, lambda: self.linked_bytes)
        try:
            yield
        finally:
            if self.linked_bytes and not store.sealed(move):  # refused, or dropped meanwhile
                store.withdraw(move)

    async def _must_be_whole(self, made: pb.MadeImage | None, files: Sequence[Path]) -> None:
        """The target is this node, and looks at nothing that it has sent to itself. In its memory nothing has changed."""
        if made is not None and self.node.store.on_disk(self.log.move):
            await made_image.must_be_whole(made, files, self._checked)

    def _checked(self, size_bytes: int) -> None:
        """Called by several threads without a lock. A lost update does no harm: the number only has to grow."""
        self.checked_bytes += size_bytes

    @contextlib.asynccontextmanager
    async def _signed(self, files: Sequence[Path]) -> AsyncIterator[asyncio.Task[pb.MadeImage] | None]:
        """Signs what a buddy gets while it is sent. What is sent again was signed before."""
        if not self.is_copy:
            yield None
            return
        task = asyncio.create_task(self._sign(files), name=f"sign {self.log.move}")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sign(self, files: Sequence[Path]) -> pb.MadeImage:
        async with self.signing:
            with readable(self.log, OSError, Unreadable):
                return await made_image.of_image(self.node.credentials, self.node.config.node, self.log, files)

    @contextlib.asynccontextmanager
    async def _streams(self, sink: TargetSink) -> AsyncIterator[Sequence[Stream]]:
        """Those of a copy keep to the limit."""
        if not self.is_copy:
            async with sink.streams() as streams:
                yield streams
            return
        links = await in_thread(link_speed.links) if self.node.config.copy_limit else {}
        with self.pacing.copy(self.log.move) as copy:
            async with sink.streams() as streams:
                yield self.pacing.limited(copy, streams, self.node.config, links)
            if copy.waited_s:
                self.waited = [pb.Part(name="limit", seconds=copy.waited_s)]

    def _link(self, files: list[Path]) -> list[Path]:
        """The target is this node: it gets device memory and pages of a snapshot without a copy, and does not write to them
        (target/restore.py). Returns the files that are to be sent."""
        target = self.node.journal.find(self.request.move)
        if target is None or target.begin.role != "target" or not self.log.begin.kind:
            return files
        folder = self.node.store.path(self.request.move)
        if folder.stat().st_dev != self.folder.stat().st_dev:
            return files  # one of them is on a disk
        pages = [path for path in files if _PAGES.fullmatch(path.name)]
        linked = [*pages, *(path for path in files if stripe_files.NAME.fullmatch(path.name))]
        for path in linked:
            with contextlib.suppress(FileExistsError):  # of an attempt whose answer was lost
                (folder / path.name).hardlink_to(path)
        if not self.node.store.on_disk(self.request.move):
            self.linked_bytes = size_bytes(pages)
        return [path for path in files if path not in linked]

    def _begin(self) -> Begin:
        """The move as the target has journalled it, for the channel and the signature."""
        begin, request = self.log.begin, self.request
        return Begin(
            move=request.move,
            role="source",
            rank_uid=check_rank_uid(begin.rank_uid),
            job=begin.job,
            rank=begin.rank,
            source_node=self.node.config.node,
            source_endpoint=self.node.config.advertise,
            target_node=request.target_node,
            target_endpoint=request.target_endpoint,
            nonce=request.nonce.hex(),
            boot_id=host.boot_id(),
            begun_unix_s=time.time(),
        )


@contextlib.contextmanager
def readable(move_log: MoveLog, *errors: type[Exception]) -> Iterator[None]:
    """Makes these errors one about the image, which is logged: the disk of this node may need a person."""
    begin = move_log.begin
    try:
        yield
    except errors as error:
        why = error.message if isinstance(error, SnapshotError) else str(error)
        where = Where.SUSPENDED if move_log.committed else Where.SOURCE_RUNNING
        found = Unreadable(f"the image {begin.move} of rank {begin.rank} of job {begin.job}: {why}", where=where)
        log.error("%s", found.message)
        raise found from error


def size_bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in files)
