"""Where the image of a frozen rank goes: to the target of its move, or, if its whole job is suspended, into a store here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves import image_seal
from snapshotd.moves.jobs import stored
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.source.channel import streams_to_target
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.stall import of_disk
from snapshotd.transport.image.stream import Stream

#: A target answers much sooner (target/sealing.py). One of an older version answers when the image is sealed.
_ANSWER_S = 60.0


class Sink(Protocol):
    def streams(self) -> AbstractAsyncContextManager[Sequence[Stream]]:
        """Streams for the chunks; the sender closes them."""

    async def seal(self, files: Sequence[pb.ImageFile]) -> Sequence[str]:
        """All files were sent: has them verified. Returns the names of those that are damaged."""


def sink_of(node: Node, move_log: MoveLog, facts: pb.RankFacts) -> Sink:
    if move_log.begin.coordinator:
        return StoreSink(node, move_log, facts)
    return TargetSink(node, move_log.begin)


class TargetSink:
    """The target of a move, or the buddy that gets a copy while the rank runs (`go_last`)."""

    def __init__(self, node: Node, begin: Begin, *, go_last: bool = False) -> None:
        self.node, self.begin, self.go_last = node, begin, go_last
        self.made: pb.MadeImage | None = None  # of a snapshot's image

    def streams(self) -> AbstractAsyncContextManager[Sequence[Stream]]:
        return streams_to_target(self.node, self.begin, go_last=self.go_last)

    async def seal(self, files: Sequence[pb.ImageFile]) -> Sequence[str]:
        begin = self.begin
        with span("sign"):
            signature = await in_thread(image_seal.sign, self.node.credentials, image_seal.statement(begin, files))
        request = pb.SealRequest(move=begin.move, files=files, signature=signature, repeats=True, made=self.made)
        with span("seal"):
            async with self.node.client(begin.target_node, begin.target_endpoint) as client:
                stall = of_disk(begin.target_node)
                while (reply := await client.target.Seal(request, timeout_s=_ANSWER_S)).unfinished:
                    stall.look(reply.synced_bytes)
                return list(reply.damaged)


class StoreSink:
    """The store of this node. What `seal` has accepted is on the disk, with what a resumption has to know."""

    def __init__(self, node: Node, move_log: MoveLog, facts: pb.RankFacts) -> None:
        self.node, self.log, self.facts = node, move_log, facts
        self.store = node.store_of(move_log.begin)

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Sequence[Stream]]:
        yield [LocalStream(self.store, self.log.move) for _ in range(self.node.config.streams)]

    async def seal(self, files: Sequence[pb.ImageFile]) -> Sequence[str]:
        with span("seal"):
            sync = self.log.begin.kind != "snapshot"  # its rank waits; it is done when the copies are sent
            with self.store.threads(self.log.move):
                damaged = await in_thread(partial(self.store.seal, self.log.move, files, sync=sync))
                if not damaged:
                    await in_thread(stored.describe, self.store.path(self.log.move), self.log, self.facts)
        return damaged
