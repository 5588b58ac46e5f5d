"""Holds the state of one move that is only in this daemon's memory, beside its journal. A restart may lose all of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.closed_files import Ahead, Scope
from snapshotd.moves.device.offload import Offload
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.precopied import Precopied, Precopy
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.moves.target.sealing import Sealing
from snapshotd.proc import host


@dataclass
class Moving:
    log: MoveLog
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by every step, and by each round of settling
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the settle loop
    lease_ends_s: float = 0.0  # CLOCK_BOOTTIME
    lease_given_up: bool = False  # source: Abort was asked for, so no renewal counts any more
    adopted: bool = False  # begun before this daemon was restarted
    restarted: bool = (
        False  # source: this daemon was restarted after STREAMED, and may have been declared dead meanwhile
    )
    interrupted: bool = False  # this daemon was restarted inside a step that cannot be resumed
    settling: asyncio.Task[None] | None = None
    streaming: asyncio.Task[None] | None = None
    offload: Offload | None = None  # source: device memory that leaves, or left, in stripes
    ahead: Ahead | None = (
        None  # source: closed files that were sent while the rank runs; None: nothing was looked at yet
    )
    precopy: Precopy | None = None  # source: memory that was sent while the rank runs; None: nothing was begun yet
    twins: TwinMemory | None = None  # source of a snapshot: memory that is copied while the rank goes on
    precopied: Precopied | None = None  # source: what of it counts, since the freeze
    undoing: bool = False  # source: Abort was asked for, and waits for a step
    scope: Scope | None = None  # source: which closed files are the rank's, as preflight saw it
    prepared: bool = False  # source: the offload was prepared, as far as possible
    facts: pb.RankFacts = field(default_factory=pb.RankFacts)  # source: the latest result of preflight
    nodes: list[pb.NodeAddresses] = field(default_factory=list)  # source: the cluster, from the driver
    short_of_memory: str = ""  # why this move is being undone by the watch of this node's memory
    restoring: asyncio.Task[Any] | None = None  # target
    sealing: Sealing | None = None  # target: of the image that has arrived
    failure: str = ""  # why a step of the move can never succeed again
    source_seen_s: float = -math.inf  # target: CLOCK_BOOTTIME of the source's last question about the copy held here
    done: bool = False  # target: woken or dropped, nothing is left to do
    waiting_for: str = ""
    given_up: str = ""  # source: why an operator has communicators given up, until that is journalled
    unbuilt: str = ""  # source: why communicators are not built again yet, from the last attempt of an undo
    pause_s: float = 0.0  # source: what the driver measured, for the history
    timing: pb.Timing = field(default_factory=pb.Timing)  # source: what the pause consisted of
    answered_s: float = field(default_factory=host.boottime_s)  # gate, target: when the source last answered

    def renew(self) -> None:
        self.lease_ends_s = host.boottime_s() + self.log.begin.lease_s
        self.wake()

    @property
    def lease_expired(self) -> bool:
        return self.lease_given_up or host.boottime_s() >= self.lease_ends_s

    @property
    def same_boot(self) -> bool:
        return self.log.begin.boot_id == host.boot_id()

    def forget(self) -> None:
        """Drops what only an open move needs, for calls that still have this one."""
        self.offload = self.ahead = self.scope = self.settling = self.streaming = None
        self.precopy = self.precopied = self.twins = self.sealing = None
        self.facts, self.nodes = pb.RankFacts(), []

    def wake(self) -> None:
        """Ends the current wait of the settle loop."""
        self.changed.set()

    async def wait(self, seconds: float) -> None:
        """Returns after this time, or as soon as `wake` is called."""
        with contextlib.suppress(TimeoutError):
            # Not wait_for: before Python 3.12 that forgets a cancellation which comes at the same moment as the event.
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        self.changed.clear()
