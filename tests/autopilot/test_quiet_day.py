"""False alarms: a day of noise, through the real checks, the daemon's event log and the autopilot, with a policy that acts on
every warning. Nothing is tainted and nothing moves. One real fault on such a day is found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TypeVar

import pytest

from migrator.autopilot import convert, silence
from migrator.autopilot.decide import RankDecision
from migrator.autopilot.engine import Engine
from migrator.autopilot.facts import AboutRank
from migrator.autopilot.model import Move, Node, NodeState, Rank
from migrator.autopilot.store import Store
from migrator.autopilot.watcher import Sighting
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Timeout
from snapshotd.health import monitor
from snapshotd.health.alarms import Severity
from snapshotd.health.check import Now
from snapshotd.health.gpus import Gpus
from snapshotd.health.monitor import Monitor
from snapshotd.health.settings import Settings
from snapshotd.runtime.blocking import Reader
from tests.autopilot import worlds
from tests.autopilot.quiet_day import DAY, HOUR, STEP_S, Bursts, Clocks, Gpu, Host

T = TypeVar("T")
NODES = ("node-1", "node-2", "node-3", "spare-1")
POLICY = worlds.acting(
    rules=[{"name": "all", "severity": "warning", "action": "drain"}],
    breaker={"nodes_percent": 80, "same_alarm_nodes": 100},
)


class Pilot(Engine):
    """The real engine. Its moves are counted, and do not end."""

    async def _carry_out(self, move: Move) -> None:
        await asyncio.Event().wait()


class Day:
    """One node with its checks, and an autopilot that follows it."""

    def __init__(self, seed: str, folder: Path, store: Store, clocks: Clocks) -> None:
        self.random, self.store, self.clocks = Random(seed), store, clocks
        self.host, self.gpus = Host(self.random, folder / "root"), [Gpu(self.random, index) for index in range(2)]
        self.monitor = Monitor(
            "node-1", folder, Settings(root=str(folder / "root"), interval_s=STEP_S, programs_dir="")
        )
        # The daemon is late now and then, for less than a minute, and sometimes the network hides it for ten.
        self.late, self.hidden = Bursts(self.random, 2, HOUR // 2), Bursts(self.random, 20, 2 * HOUR)
        cluster = Cluster("the test", dict.fromkeys(NODES, "127.0.0.1:1"), labels={"spare-1": {"spare": "dedicated"}})
        self.engine = Pilot(cluster, POLICY, store, on_round=self.on_round)
        self.moves = self.alarms = 0
        self.states: set[NodeState] = set()
        for name in NODES:
            self.answered(name)

    def on_round(self, world: World, decided: list[AboutRank], alerts: Mapping[str, str]) -> None:
        self.states |= {node.state for node in world.nodes.values()}
        self.moves += sum(about.decision is RankDecision.MOVE for about in decided)
        assert not alerts

    def answered(self, name: str) -> None:
        watcher = self.engine.watchers[name]
        node: Node = worlds.node(name)
        ranks: tuple[Rank, ...] = () if name.startswith("spare") else (worlds.rank(NODES.index(name), name),)
        watcher.sighting = Sighting(node, ranks, self.store.now())
        watcher.error, watcher.silent_since = None, None

    async def step(self) -> bool:
        """One reading of everything. Returns whether the autopilot has learned something."""
        self.clocks.step()
        self.host.step(self.clocks.monotonic_s)
        now = Now(self.clocks.unix_s, self.clocks.monotonic_s)
        signals = []
        for group in self.monitor._groups:
            if isinstance(group, Gpus):
                signals += group._judge.judged([gpu.reading() for gpu in self.gpus], now)
            else:
                signals += await group.read(now)
        if signals:
            await self.monitor.report(signals)
        watcher = self.engine.watchers["node-1"]
        was_silent = watcher.error is not None
        if next(self.late) | next(self.hidden):
            if watcher.error is None:
                watcher.error, watcher.silent_since = Timeout("no answer within 10 s"), self.clocks.monotonic_s
            return not was_silent
        self.answered("node-1")
        if signals or was_silent:
            epoch, sequence = await self.store.cursor("node-1")
            health = await self.monitor.since(pb.GetHealthRequest(epoch=epoch, after=sequence))
            self.alarms += len(health.events)
            assert all(alarm.severity < Severity.WARNING for alarm in health.alarms) or self.gpus[0].uncorrected
            await self.store.take_in(convert.health("node-1", health))
        return bool(signals) or was_silent

    async def run(self, steps: int) -> None:
        for number in range(steps):
            # Rounds in between would decide the same: only the time differs.
            if await self.step() or number % 20 == 0:
                await self.engine._round()


@pytest.fixture
def without_hardware(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """A clock for a day of seconds, readings without a thread for each, and neighbours that reach a node."""
    clocks = Clocks(Random(1), time.time())

    async def at_once(self: Reader, function: Callable[[], T], limit_s: float) -> T:
        return function()

    async def reached(cluster: Cluster, node: str, others: list[str]) -> dict[str, SimpleNamespace]:
        return {other: SimpleNamespace(daemon_answers=True) for other in others}

    fake = SimpleNamespace(time=lambda: clocks.unix_s, monotonic=lambda: clocks.monotonic_s)
    monkeypatch.setattr(Reader, "run", at_once)
    monkeypatch.setattr(monitor, "time", fake)
    monkeypatch.setattr(silence, "time", fake)
    monkeypatch.setattr("migrator.autopilot.watcher.time", fake)
    monkeypatch.setattr(silence, "ask_others", reached)
    return clocks


@pytest.mark.sampled(1, group="a quiet day")
async def test_a_day_of_noise_taints_nothing_and_moves_nothing(
    tmp_path: Path, without_hardware: Clocks, pytestconfig: pytest.Config
) -> None:
    seed = f"{pytestconfig.option.seed}/quiet day"
    async with Store.open(tmp_path / "state", lambda: without_hardware.unix_s) as store:
        day = Day(seed, tmp_path, store, without_hardware)
        await day.run(DAY)
        kinds = {record.kind for record in await store.events()}
    assert without_hardware.monotonic_s == 10_000.0 + DAY * STEP_S
    assert day.moves == 0
    assert day.states == {NodeState.HEALTHY, NodeState.SUSPECT}  # suspect: while its daemon was late
    assert day.alarms > 0, "not even notices of users' mistakes were raised: the noise does not reach the autopilot"
    assert kinds == {"signal", "state"}


@pytest.mark.sampled(1, group="a quiet day")
async def test_one_fault_on_such_a_day_is_found(
    tmp_path: Path, without_hardware: Clocks, pytestconfig: pytest.Config
) -> None:
    seed = f"{pytestconfig.option.seed}/quiet day with a fault"
    async with Store.open(tmp_path / "state", lambda: without_hardware.unix_s) as store:
        day = Day(seed, tmp_path, store, without_hardware)
        await day.run(HOUR)
        assert (day.moves, day.states & {NodeState.DRAINING, NodeState.TAINTED}) == (0, set())
        day.gpus[0].uncorrected += 1
        await day.run(40)  # more than it takes a late daemon to answer
        for task in day.engine._moving.values():
            task.cancel()
    assert day.moves == 1
    assert NodeState.DRAINING in day.states
