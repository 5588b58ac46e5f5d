"""An NCCL job of thousands of ranks that exists only as answers of daemons: the other side of bench_scale.

The ranks train a model with tensor, pipeline, data and expert parallelism. Each is a position in its program; what it has
launched, and where its gate stops it, is computed from that. Real: gRPC, the messages, the rules of the gate. Not real: TLS,
the shim, and the time that a rank needs to launch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import grpc

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as stubs
from snapshotd.api.calls import MAX_MESSAGE_BYTES

RANKS_PER_NODE = 8
JOB, USER_ID = "large", 1000
MAIN, AUTOGRAD = 11, 12
#: (communicator, kind, the other member's rank in the communicator), as a gate counts.
Key = tuple[str, int, int]
COLLECTIVE, SEND, RECEIVE = pb.ChannelCount.COLLECTIVE, pb.ChannelCount.SEND, pb.ChannelCount.RECEIVE


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups. Ranks are numbered with tensor parallelism first, then data, then pipeline stages."""

    tensor: int
    data: int
    stages: int
    microbatches: int = 16
    turns: bool = False  # main and autograd threads take turns; otherwise one thread launches everything

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.stages


@dataclass(frozen=True)
class Place:
    """One rank: its communicators, and its program."""

    layout: Layout
    rank: int

    @cached_property
    def memberships(self) -> dict[str, tuple[int, int]]:
        """Communicator → (its size, this rank's number in it)."""
        size = self.layout
        across, stage = divmod(self.rank, size.tensor * size.data)[::-1]
        replica, part = divmod(across, size.tensor)
        half, place = divmod(replica, max(1, size.data // 2))
        found = {
            "world": (size.ranks, self.rank),
            f"tp-{stage}-{replica}": (size.tensor, part),
            f"dp-{stage}-{part}": (size.data, replica),
            f"zero-{stage}-{part}": (size.data, replica),
            f"dp-half-{stage}-{part}-{half}": (
                min(max(1, size.data // 2), size.data - half * max(1, size.data // 2)),
                place,
            ),
            f"ep-{stage}": (size.tensor * size.data, across),
            f"ep-dp-{stage}-{part}": (size.data, replica),
            f"pp-{across}": (size.stages, stage),
            f"embedding-{across}": (size.stages, stage),
            f"model-{replica}": (size.tensor * size.stages, stage * size.tensor + part),
        }
        # Communicators need the form of ids that daemons check.
        return {f"{hash_of(name):016x}": known for name, known in found.items()}

    def comm(self, index: int) -> str:
        return list(self.memberships)[index]

    @cached_property
    def step(self) -> list[tuple[int, Counter[Key]]]:
        """What one step launches: the thread and the group."""
        world, tp, dp, zero, _, ep, _, pp, _, model = self.memberships
        stage, last = self.memberships[pp][1], self.layout.stages - 1
        groups: list[tuple[int, Counter[Key]]] = []

        def add(thread: int, *keys: Key) -> None:
            if keys:
                groups.append((thread if self.layout.turns else MAIN, Counter(keys)))

        for _ in range(self.layout.microbatches):
            add(MAIN, *([(pp, RECEIVE, stage - 1)] if stage else []))
            add(MAIN, (tp, COLLECTIVE, -1))
            add(MAIN, (ep, COLLECTIVE, -1))
            add(MAIN, *([(pp, SEND, stage + 1)] if stage < last else []))
            add(AUTOGRAD, *([(pp, RECEIVE, stage + 1)] if stage < last else []))
            add(AUTOGRAD, (tp, COLLECTIVE, -1))
            add(AUTOGRAD, *([(pp, SEND, stage - 1)] if stage else []))
        add(AUTOGRAD, (dp, COLLECTIVE, -1))
        add(MAIN, (zero, COLLECTIVE, -1), (zero, COLLECTIVE, -1))
        add(MAIN, (model, COLLECTIVE, -1))
        add(MAIN, (world, COLLECTIVE, -1))
        return groups


def hash_of(name: str) -> int:
    """The same in every process."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


@dataclass
class Rank:
    place: Place
    at: int  # groups launched
    closed: bool = False
    targets: dict[Key, int] = field(default_factory=dict)
    permissions: list[tuple[int, Key, int, int]] = field(default_factory=list)  # thread, channel, until, passed
    passed: int = 0

    def __post_init__(self) -> None:
        step = self.place.step
        whole, rest = divmod(self.at, len(step))
        self.launched: Counter[Key] = Counter()
        for index, (_, group) in enumerate(step):
            for key, count in group.items():
                self.launched[key] += count * (whole + (index < rest))
        for comm in self.place.memberships:  # its creation counts
            self.launched[comm, COLLECTIVE, -1] += 1
        self._shown = pb.ProcessGate(rank_uid=uid(self.place.rank), rank=self.place.rank, pid=100)
        self._shown_at: tuple[int, bool] | None = None
        users = [MAIN, AUTOGRAD] if self.place.layout.turns else [MAIN]
        self._comms = {
            comm: self._shown.communicators.add(id=comm, nranks=size, rank=number, state="live", users=users)
            for comm, (size, number) in self.place.memberships.items()
        }

    def run(self) -> None:
        step = self.place.step
        while self.closed:
            thread, group = step[self.at % len(step)]
            if not any(self.launched[key] < self.targets.get(key, 0) for key in group) and not self._permitted(thread):
                return
            for key, count in group.items():
                self.launched[key] += count
            self.at += 1
            self.passed += 1

    def _permitted(self, thread: int) -> bool:
        return any(
            wanted in (0, thread) and self.passed < passed and self.launched[key] < until
            for wanted, key, until, passed in self.permissions
        )

    def take(self, told: pb.ProcessTargets) -> None:
        self.targets = {(one.communicator, one.kind, one.peer): one.count for one in told.targets}
        if hasattr(told, "permissions"):  # the bench also measures versions without them
            self.permissions = [
                (one.thread, (one.until.communicator, one.until.kind, one.until.peer), one.until.count, one.passed)
                for one in told.permissions
            ]

    def shown(self) -> pb.ProcessGate:
        """Its report. The message is kept and only changed, because the driver is what is measured."""
        self.run()
        if self._shown_at == (self.at, self.closed):
            return self._shown
        self._shown_at = self.at, self.closed
        made, comms = self._shown, self._comms
        if hasattr(made, "passed"):
            made.passed = self.passed
        for (comm, kind, peer), count in self.launched.items():
            if kind == SEND:
                comms[comm].sent[peer] = count
            elif kind == RECEIVE:
                comms[comm].received[peer] = count
            else:
                comms[comm].collectives = count
        del made.waiting[:]
        if self.closed:
            thread, group = self.place.step[self.at % len(self.place.step)]
            waiting = made.waiting.add(thread=thread)
            for (comm, kind, peer), count in group.items():
                waiting.group.add(communicator=comm, kind=kind, peer=peer, count=count)
        return made


def uid(rank: int) -> str:
    return f"{JOB}-{rank}-00000001"


@dataclass(frozen=True)
class Weather:
    """How well the nodes answer."""

    slow: float = 0.0  # the share of nodes that answer SLOW_S late
    lost: float = 0.0  # the share of answers that get lost: what was asked for is done, and the call fails


SLOW_S = 0.05
Context = grpc.aio.ServicerContext[Any, Any]


class SimulatedNode(stubs.GateServicer, stubs.NodeServicer):
    """The daemon of one node."""

    def __init__(self, name: str, ranks: list[Rank], delay_s: float = 0.0, lost: float = 0.0) -> None:
        self.name, self.ranks, self.delay_s, self.lost = name, ranks, delay_s, lost
        self.random = Random(name)
        self.answers_lost = 0

    async def _may_be_lost(self, context: Context) -> None:
        if self.random.random() < self.lost:
            self.answers_lost += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")

    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        await self._may_be_lost(context)
        found = [
            pb.Rank(uid=uid(one.place.rank), job=JOB, rank=one.place.rank, place=pb.Rank.HERE, user_id=USER_ID)
            for one in self.ranks
        ]
        return pb.ListRanksReply(ranks=found)

    async def Report(self, request: pb.GateReportRequest, context: Context) -> pb.GateReport:
        await asyncio.sleep(self.delay_s)
        made = pb.GateReport(processes=[one.shown() for one in self.ranks])
        await self._may_be_lost(context)
        return made

    async def Close(self, request: pb.MoveDescription, context: Context) -> pb.GateReport:
        for one in self.ranks:
            one.closed = True
        return await self.Report(pb.GateReportRequest(), context)

    async def SetTargets(self, request: pb.SetTargetsRequest, context: Context) -> pb.GateReport:
        told = {process.rank_uid: process for process in request.processes}
        for one in self.ranks:
            if uid(one.place.rank) in told:
                one.take(told[uid(one.place.rank)])
        return await self.Report(pb.GateReportRequest(), context)


def starts(layout: Layout, skew: int, seed: int) -> list[Rank]:
    """Every rank at a random position, up to `skew` micro-batches apart."""
    random, ranks = Random(seed), []
    for number in range(layout.ranks):
        place = Place(layout, number)
        per_batch = max(1, (len(place.step) - 4) // layout.microbatches)
        ranks.append(Rank(place, 3 * len(place.step) + random.randrange(skew * per_batch + 1)))
    return ranks


def delays(ranks: int, weather: Weather, seed: int) -> list[float]:
    """How late each node answers."""
    random = Random(seed)
    return [SLOW_S if random.random() < weather.slow else 0.0 for _ in range(0, ranks, RANKS_PER_NODE)]


async def serve(folder: Path, ranks: list[Rank], weather: Weather, seed: int, ready: Callable[[], None]) -> None:
    """Serves all nodes, each on a socket of its own in the folder, until it is cancelled."""
    servers = []
    for number, delay_s in zip(range(0, len(ranks), RANKS_PER_NODE), delays(len(ranks), weather, seed), strict=True):
        name = f"node-{number // RANKS_PER_NODE}"
        mine = ranks[number : number + RANKS_PER_NODE]
        node = SimulatedNode(name, mine, delay_s, weather.lost)  # type: ignore[abstract] # other calls: UNIMPLEMENTED
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ]
        server = grpc.aio.server(options=options)
        stubs.add_GateServicer_to_server(node, server)
        stubs.add_NodeServicer_to_server(node, server)
        server.add_insecure_port(f"unix:{folder / name}")
        await server.start()
        servers.append(server)
    ready()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.gather(*(server.stop(None) for server in servers))
