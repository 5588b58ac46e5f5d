"""A large cluster that exists only as answers: the nodes of the autopilot's benchmark, in the same process.

What is real: messages, their conversion, the watchers' long polls. What is not: connections (gRPC, TLS) and the moves, which
end after a while with the rank on its target. Readings of progress, for stragglers, are switched off.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from migrator.autopilot.engine import Engine
from migrator.autopilot.model import Move, MoveState
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb

GIB = 1 << 30
GPUS = 8
#: Ranks of one job: so many nodes.
JOB_NODES = 8
#: What counters of a large cluster report all day.
NOISE = (
    ("gpu-ecc", pb.NOTICE, "GPU %d corrected 1 error of its memory"),
    ("gpu-remap", pb.NOTICE, "GPU %d replaced 1 rows of its memory"),
    ("gpu-xid", pb.NOTICE, "the driver reported Xid 43 on GPU %d"),
    ("gpu-pcie", pb.WARNING, "GPU %d repeated 30 transfers on PCIe within an hour"),
)


@dataclass
class Daemon:
    """One node: what its daemon would answer."""

    name: str
    spare: bool
    number: int
    alarms: dict[tuple[str, str], pb.Alarm] = field(default_factory=dict)
    events: list[pb.HealthEvent] = field(default_factory=list)
    ranks: list[pb.Rank] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def node(self) -> Daemon:
        return self

    async def __aenter__(self) -> Daemon:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def uuid(self, gpu: int) -> str:
        return f"GPU-{self.number:08x}-0000-0000-0000-{gpu:012x}"

    def signal(self, kind: Any, check: str, subject: str, severity: Any, text: str) -> None:
        """Something that the daemon's checks have seen."""
        now, key = time.time(), (check, subject)
        if kind == pb.HealthEvent.CLEARED:
            del self.alarms[key]
        elif key in self.alarms:
            self.alarms[key].count += 1
            self.alarms[key].last_unix_s = now
        else:
            self.alarms[key] = pb.Alarm(
                check=check, subject=subject, severity=severity, text=text, since_unix_s=now, last_unix_s=now, count=1
            )
        self.events.append(
            pb.HealthEvent(
                sequence=len(self.events) + 1,
                unix_s=now,
                kind=kind,
                check=check,
                subject=subject,
                severity=severity,
                text=text,
            )
        )
        self.changed.set()

    def noise(self, random: Random) -> None:
        """One quiet signal: raised, repeated, or cleared again."""
        check, severity, text = random.choice(NOISE)
        gpu = random.randrange(GPUS)
        key = (check, f"gpu:{self.uuid(gpu)}")
        kinds = (pb.HealthEvent.REPEATED, pb.HealthEvent.CLEARED) if key in self.alarms else (pb.HealthEvent.RAISED,)
        self.signal(random.choice(kinds), *key, severity, text % gpu)

    def fail(self, gpu: int) -> None:
        text = "the driver reported Xid 79: GPU has fallen off the bus"
        self.signal(pb.HealthEvent.RAISED, "gpu-lost", f"gpu:{self.uuid(gpu)}", pb.CRITICAL, text)

    # ---------------------------------------------------------------- what it answers

    async def GetHealth(self, request: pb.GetHealthRequest, *, timeout_s: float) -> pb.Health:
        known = request.after if request.epoch == "e1" else 0
        if len(self.events) <= known and request.wait_s > 0:
            self.changed.clear()
            try:
                async with asyncio.timeout(request.wait_s):
                    await self.changed.wait()
            except TimeoutError:
                pass
        reply = pb.Health(
            node=self.name,
            epoch="e1",
            sequence=len(self.events),
            alarms=self.alarms.values(),
            events=self.events[known:],
        )
        return pb.Health.FromString(reply.SerializeToString())

    async def GetNode(self, request: pb.GetNodeRequest, *, timeout_s: float) -> pb.NodeInfo:
        used = {gpu for rank in self.ranks for gpu in rank.gpus}
        gpus = [
            pb.Gpu(
                uuid=self.uuid(gpu),
                index=gpu,
                name="NVIDIA H200",
                memory_bytes=141 * GIB,
                processes=[pb.GpuProcess(pid=1)] if self.uuid(gpu) in used else [],
            )
            for gpu in range(GPUS)
        ]
        info = pb.NodeInfo(
            name=self.name, memory_available_bytes=1024 * GIB, gpus=gpus, driver_version="580.1", ranks=len(self.ranks)
        )
        return pb.NodeInfo.FromString(info.SerializeToString())

    async def GetProgress(self, request: pb.GetProgressRequest, *, timeout_s: float) -> pb.NodeProgress:
        return pb.NodeProgress(now_unix_s=time.time())  # readings are switched off

    async def ListRanks(self, request: pb.ListRanksRequest, *, timeout_s: float) -> pb.ListRanksReply:
        return pb.ListRanksReply.FromString(pb.ListRanksReply(ranks=self.ranks).SerializeToString())


@dataclass(frozen=True)
class SimulatedCluster(Cluster):
    daemons: dict[str, Daemon] = field(default_factory=dict)

    def client(self, node: str) -> Any:
        return self.daemons[node]


def simulated(nodes: int, spares: int) -> SimulatedCluster:
    """So many nodes with a rank on each of their GPUs, and idle spares."""
    daemons = {}
    for number in range(nodes + spares):
        spare = number >= nodes
        name = f"spare-{number - nodes + 1}" if spare else f"node-{number + 1}"
        made = daemons[name] = Daemon(name, spare, number)
        for gpu in range(0 if spare else GPUS):
            job, index = f"train-{number // JOB_NODES}", number % JOB_NODES * GPUS + gpu
            made.ranks.append(
                pb.Rank(
                    uid=f"{job}-{index}-{number:08x}",
                    job=job,
                    rank=index,
                    place=pb.Rank.HERE,
                    at_node=name,
                    home_node=name,
                    user_id=1000,
                    memory_bytes=30 * GIB,
                    device_bytes=100 * GIB,
                    gpus=[made.uuid(gpu)],
                )
            )
    labels = {name: {"spare": "dedicated"} for name, one in daemons.items() if one.spare}
    return SimulatedCluster("simulated", dict.fromkeys(daemons, "simulated:1"), labels=labels, daemons=daemons)


class SimulatedEngine(Engine):
    """The real engine, whose moves take a while and then have succeeded."""

    MOVE_S = 5.0

    async def _carry_out(self, move: Move) -> None:
        assert isinstance(self.cluster, SimulatedCluster)
        await asyncio.sleep(self.MOVE_S)
        source, target = self.cluster.daemons[move.source], self.cluster.daemons[move.target]
        (rank,) = [rank for rank in source.ranks if rank.uid == move.rank_uid]
        source.ranks.remove(rank)
        used = {gpu for other in target.ranks for gpu in other.gpus}
        rank.gpus[:] = [next(target.uuid(gpu) for gpu in range(GPUS) if target.uuid(gpu) not in used)]
        target.ranks.append(rank)
        await self.store.finish(move.id, MoveState.MOVED, "", self.MOVE_S)
        self._look_again(move)
