"""Preparations on a target: those in progress, and what is journalled of them.

A driver that gives an attempt up does not wait for Prepare, and a step that has begun runs to its end: it may wait for room,
or for a disk. Without this, what was undone in the meantime would be journalled all the same, and be in the way of the next
attempt to resume the rank here until it is cleaned up.

Invariant: whether an attempt is undone, its coordinator says. A Discard only makes the target ask once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy
from snapshotd.config import Config
from snapshotd.moves.journal import Journal
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import resumed
from snapshotd.proc import host

#: How long a Discard waits for the end of the preparation. One that hangs is refused later.
WAIT_S = 5.0


class Preparing:
    """One instance per daemon."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._running: dict[str, asyncio.Event] = {}  # by move: set when it has ended
        self._doubted: set[str] = set()  # moves of which a Discard came meanwhile

    @contextlib.contextmanager
    def of(self, request: pb.PrepareRequest) -> Iterator[None]:
        """A preparation of a part of a job. Others are no concern of this: their source ends them."""
        if not request.HasField("coordinator"):
            yield
            return
        if request.move in self._running:
            raise Busy(f"move {request.move} is being prepared already")
        ended = self._running[request.move] = asyncio.Event()
        try:
            yield
        finally:
            ended.set()
            del self._running[request.move]
            self._doubted.discard(request.move)

    async def must_be_wanted(self, request: pb.PrepareRequest) -> None:
        """Before it is journalled. Raises WrongState if the attempt is undone."""
        if request.move in self._doubted:
            await resumed.check_coordinator(self.node, request)

    async def doubt(self, move: str) -> None:
        """Somebody says that the attempt is undone. Waits until its preparation has ended: its room is free then, or the move
        is in the journal."""
        if (ended := self._running.get(move)) is None:
            return
        self._doubted.add(move)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await ended.wait()


def must_have_left(journal: Journal, rank_uid: str) -> None:
    """Raises Busy while a move of the rank away from here is not cleaned up."""
    for older in journal.all():
        same = (older.begin.rank_uid, older.begin.role) == (rank_uid, "source")
        if same and older.last_mark is not Mark.SETTLED:
            raise Busy(f"move {older.move} of this rank away from here is not cleaned up yet")


def begin_of(config: Config, request: pb.PrepareRequest, sender: str, user_id: int, kind: str = "") -> Begin:
    """What is journalled of a move that is prepared here."""
    rank, coordinator = request.facts.rank, request.coordinator
    return Begin(
        move=request.move,
        role="target",
        rank_uid=rank.uid,
        job=rank.job,
        rank=rank.rank,
        source_node=sender,
        source_endpoint=request.source_endpoint,
        target_node=config.node,
        target_endpoint=config.advertise,
        nonce=secrets.token_hex(32),
        boot_id=host.boot_id(),
        begun_unix_s=time.time(),
        user_id=user_id,
        coordinator=coordinator.record,
        coordinator_node=coordinator.node,
        coordinator_endpoint=coordinator.endpoint,
        kind=kind,
    )
