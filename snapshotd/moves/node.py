"""Holds what all operations of this daemon share: configuration, journal, ranks, image store, clients of other daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from snapshotd.api.calls import Channel
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.config import Config
from snapshotd.cuda.driver import Gpus
from snapshotd.holder.backed import BackedHolder
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.carry import Carry
from snapshotd.moves.journal import Journal
from snapshotd.moves.kept_files import KeptFiles
from snapshotd.moves.record import Begin
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.saved import Late, Saved
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process
from snapshotd.transport.image.spill import SpillingStore
from snapshotd.transport.image.store import ImageStore


@dataclass
class Node:
    """This node, as its operations see it."""

    config: Config
    journal: Journal
    reserve: Reserve
    ranks: Ranks
    store: SpillingStore
    suspended: ImageStore  # images of suspended ranks, on a disk
    carry: Carry
    gpus: Gpus
    room: Room
    holder: BackedHolder
    kept_files: KeptFiles
    connect: Callable[[str, str], Channel]  # a new connection to the daemon of (node, endpoint)
    lost: Callable[[RankEntry], Awaitable[None]]  # ends a rank whose keeper is dead, and reports it to its home
    #: Held during a dump in which criu makes links: it uses the same numbers in every dump, so two dumps would collide.
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)
    caches_left: dict[str, int] = field(default_factory=dict)  # by move: bytes that torch's cache returned
    gpu_copies: dict[str, tuple[str, int]] = field(
        default_factory=dict
    )  # by move: GPU and bytes of a snapshot's copy there
    saving: dict[tuple[str, Late], asyncio.Task[Saved]] = field(
        default_factory=dict
    )  # by move: memory of its rank goes into the image

    #: Processes of ranks that have adopted a twin: they adopt orphans.
    adopters: set[Process] = field(default_factory=set)

    def client(self, name: str, endpoint: str) -> DaemonClient:
        """A client of another daemon, with this node's own certificate. Use it as a context manager."""
        return DaemonClient(endpoint, node=name, channel=self.connect(name, endpoint))

    def store_of(self, begin: Begin) -> ImageStore:
        """Where the image of a suspended rank, or of a snapshot, lies. Snapshots are replaced every few minutes."""
        return self.store if begin.kind in {"snapshot", "copy"} else self.suspended

    @property
    def credentials(self) -> Credentials:
        return self.config.credentials
