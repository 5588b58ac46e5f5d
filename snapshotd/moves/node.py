"""What every operation of this daemon shares: its configuration, journal, ranks, image store, and clients to others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import SnapshotError, Where
from snapshotd.config import Config
from snapshotd.cuda.driver import Gpus
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.carry import Carry
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.rules import Mark
from snapshotd.proc import host
from snapshotd.runtime.logs import move_context
from snapshotd.transport.image.store import ImageStore

if TYPE_CHECKING:
    from snapshotd.moves.device.offload import Parking

log = logging.getLogger(__name__)


@dataclass
class Node:
    """This node, as its operations see it."""

    config: Config
    journal: Journal
    ranks: Ranks
    store: ImageStore
    carry: Carry
    gpus: Gpus
    lost: Callable[[RankEntry], Awaitable[None]]  # a rank whose keeper is dead: ends it, and tells its home
    #: Held by a dump in which criu makes links: it numbers them alike in every dump, and two would want the same names.
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Held by whoever looks whether there is room for parked device memory, until he has taken it.
    taking_room: asyncio.Lock = field(default_factory=asyncio.Lock)
    caches_left: dict[str, int] = field(default_factory=dict)  # by move: what torch gave back while the job ran

    def client(self, name: str, endpoint: str) -> DaemonClient:
        """A client of another daemon, with this node's own certificate. Use it as a context manager."""
        return DaemonClient(endpoint, credentials=self.credentials, node=name)

    @property
    def credentials(self) -> Credentials:
        return self.config.credentials


@dataclass
class Moving:
    """One move in this daemon's memory, beside its log in the journal. All of it can be lost."""

    log: MoveLog
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kick: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the settling task
    lease_ends_s: float = 0.0  # CLOCK_BOOTTIME
    adopted: bool = False  # taken up from an earlier life of this daemon
    interrupted: bool = False  # this daemon restarted inside a step that cannot be resumed
    settling: asyncio.Task[None] | None = None
    streaming: asyncio.Task[None] | None = None
    parking: Parking | None = None  # source: device memory that leaves, or left, in stripes
    prepared: bool = False  # … was made ready for it, as far as it could be
    facts: pb.RankFacts = field(default_factory=pb.RankFacts)  # source: what preflight last saw
    nodes: list[pb.NodeAddresses] = field(default_factory=list)  # source: the cluster, from the driver
    failure: str = ""  # why a step of it can never succeed again
    done: bool = False  # target: woken or dropped, nothing is left to do
    waiting_for: str = ""
    pause_s: float = 0.0  # source: what the driver saw, for the history
    undoing_since_s: float = 0.0  # source: CLOCK_BOOTTIME of the first try to build communicators again
    answered_s: float = field(default_factory=host.boottime_s)  # gate: when the source last did

    def renew(self) -> None:
        self.lease_ends_s = host.boottime_s() + self.log.begin.lease_s
        self.kick.set()

    @property
    def lease_expired(self) -> bool:
        return host.boottime_s() >= self.lease_ends_s

    @property
    def same_boot(self) -> bool:
        return self.log.begin.boot_id == host.boot_id()

    async def nap(self, seconds: float) -> None:
        """Sleeps, or until something happened to the move."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.kick.wait(), seconds)
        self.kick.clear()


async def follow(
    moving: Moving, settle_once: Callable[[Moving], Awaitable[None]], driver_first_s: float, again_s: float, whose: str
) -> None:
    """Settles one move until it is SETTLED, after giving the driver its time; says what it waits for when that changes."""
    with move_context(move=moving.log.move, rank=moving.log.begin.rank, phase="settle"):
        said = ""
        await moving.nap(driver_first_s)
        while moving.log.last_mark is not Mark.SETTLED:
            try:
                async with moving.lock:
                    await settle_once(moving)
            except SnapshotError as error:
                moving.waiting_for = error.message
            except Exception:
                log.exception("settling the %s of %s", whose, moving.log.move)
            if moving.waiting_for != said:
                said = moving.waiting_for
                log.info("move %s: %s: %s", moving.log.move, whose, said)
            await moving.nap(again_s)


P = ParamSpec("P")
T = TypeVar("T")
_begun: set[asyncio.Task[Any]] = set()


def to_the_end(step: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A step that is carried out once begun: gRPC cancels the call of a driver that died or lost its way, and half a step
    (ACTIVATED written, but nobody woken) is not among the things that the rules know."""

    @functools.wraps(step)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(step(*args, **kwargs))
        _begun.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(_done)
        return await asyncio.shield(task)

    return shielded


def _done(task: asyncio.Task[Any]) -> None:
    _begun.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("a step ended with %s", error)  # whoever still waits for it gets the error itself


def where_on_source(log: MoveLog) -> Where:
    """Where the rank is, as far as a source's journal tells."""
    if log.committed:
        return Where.TARGET_RUNNING if log.last_mark is Mark.SETTLED else Where.TARGET_HELD
    if log.outcome is not None or log.last_mark is Mark.BEGUN:
        return Where.SOURCE_RUNNING
    return Where.SOURCE_FROZEN


def where_of(log: MoveLog) -> Where:
    """Where the rank is, as far as this daemon's journal tells."""
    if log.begin.role == "source":
        return where_on_source(log)
    match log.last_mark:
        case Mark.ACTIVATED:
            return Where.TARGET_RUNNING
        case Mark.HELD:
            return Where.TARGET_HELD
        case Mark.DISCARDED:
            return Where.SOURCE_RUNNING
        case _:
            return Where.SOURCE_FROZEN


def now_unix_s() -> float:
    return time.time()
