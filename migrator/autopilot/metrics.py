"""The autopilot's metrics in the Prometheus text format. With `--metrics`, snapshotd/api/metrics_http.py serves them.

Invariant: gauges show the last round of decisions. Counters count records of the event log, also those of earlier processes,
so a restart neither resets them nor hides what happened meanwhile. Only the signals of the webhook begin anew, because most
of them are not recorded. Labels have names of nodes and checks, never of jobs or users.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from migrator.autopilot.chain import Record
from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank
from migrator.autopilot.model import Action, MoveState, NodeState
from migrator.autopilot.policy import Policy
from migrator.autopilot.spares import free_spares
from migrator.autopilot.store import Store
from migrator.autopilot.suspension import SuspensionState
from migrator.autopilot.world import World
from snapshotd.api import version

_PAUSES_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SIGNAL_OUTCOMES = ("raised", "repeated", "cleared", "unchanged", "unknown_node", "refused", "unauthorised")
#: How many records are read at a time, so that a long log does not block the loop.
_PAGE = 1000
_JOB_DECISIONS = {SuspensionState.SUSPENDING: "suspend", SuspensionState.RESUMING: "resume"}


class Metrics:
    """One process. Everything here is called on the event loop."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._latest: tuple[World, Sequence[AboutRank], Mapping[str, str]] | None = None  # not shown yet
        self.registry = made = CollectorRegistry()
        self._nodes = Gauge("migrator_nodes", "Nodes, by state", ["state"], registry=made)
        self._silent = Gauge("migrator_nodes_unreachable", "Nodes whose daemon does not answer", registry=made)
        self._alarms = Gauge("migrator_alarms", "Alarms that are latched", ["node", "check", "severity"], registry=made)
        self._ranks = Gauge("migrator_ranks", "Ranks on all nodes", registry=made)
        self._waiting = Gauge(
            "migrator_ranks_waiting",
            "Ranks that must leave their node and are not being moved",
            ["node"],
            registry=made,
        )
        self._running = Gauge("migrator_moves_running", "Moves in progress", registry=made)
        self._moves = Counter("migrator_moves", "Moves that ended, by outcome", ["outcome"], registry=made)
        self._pauses = Histogram(
            "migrator_move_pause_seconds", "Pause of a moved rank", buckets=_PAUSES_S, registry=made
        )
        self._decisions = Counter(
            "migrator_decisions", "Decisions of the autopilot that were recorded", ["decision"], registry=made
        )
        self._alerts = Gauge("migrator_alerts", "Things that a person must look at", registry=made)
        self._spares = Gauge("migrator_spares", "Nodes that are spares", registry=made)
        self._free = Gauge("migrator_spares_free", "Spares that a rank can be moved to now", registry=made)
        self._free_gpus = Gauge("migrator_spare_gpus_free", "Free GPUs of the spares that can be used", registry=made)
        self._orders = Gauge("migrator_orders_open", "Orders of operators that have not ended", registry=made)
        self._signals = Counter(
            "migrator_webhook_signals", "Signals from outside, by outcome", ["outcome"], registry=made
        )
        self._rules = Gauge("migrator_rules_acting", "Rules of the policy that act; 0: it only observes", registry=made)
        self._round = Gauge(
            "migrator_last_round_timestamp_seconds", "When it last decided, in seconds since 1970", registry=made
        )
        self._leader = Gauge("migrator_leader", "1: this autopilot acts; 0: it stands by", registry=made)
        self._store = Gauge("migrator_store_reachable", "0: etcd does not answer, so nothing is decided", registry=made)
        self.role(leads=True, reachable=True)
        Info("migrator", "This autopilot", registry=made).info({"version": version.described()})
        ProcessCollector(registry=made)
        self._rules.set(sum(rule.action is not Action.OBSERVE for rule in policy.rules))
        self._round.set(time.time())  # the first round waits for the answers of all nodes
        # A counter with labels is absent until it is first used, and then increase() misses its first event.
        for outcome in MoveState:
            if outcome is not MoveState.INTENDED:
                self._moves.labels(outcome=_label(outcome))
        for decision in ("move", *_JOB_DECISIONS.values(), "alert", *NodeState):
            if decision is not NodeState.VALIDATING:  # an operator's order
                self._decisions.labels(decision=decision)
        for name in SIGNAL_OUTCOMES:
            self._signals.labels(outcome=name)

    def count_signals(self, outcome: str, count: int) -> None:
        self._signals.labels(outcome=outcome).inc(count)

    def role(self, *, leads: bool, reachable: bool) -> None:
        self._leader.set(leads)
        self._store.set(reachable)

    async def count_log(self, store: Store) -> None:
        """Counts what is in the log already."""
        last = 0
        while records := await store.events(last, _PAGE):
            for one in records:
                self.count(one)
            last = records[-1].id

    def count(self, record: Record) -> None:
        """Called once for each record, after it was written."""
        data = record.data
        if record.kind == "result":
            self._moves.labels(outcome=_label(str(data["state"]))).inc()
            if data["state"] == MoveState.MOVED and data.get("pause_s"):
                self._pauses.observe(float(data["pause_s"]))
        elif record.kind == "intent":
            self._decisions.labels(decision="move").inc()
        elif record.kind == "suspension" and data["state"] in _JOB_DECISIONS:
            self._decisions.labels(decision=_JOB_DECISIONS[SuspensionState(data["state"])]).inc()
        elif record.kind == "alert":
            self._decisions.labels(decision="alert").inc()
        elif record.kind == "state" and data["by"] == "autopilot":
            self._decisions.labels(decision=str(data["to"])).inc()

    def round(self, world: World, decided: Sequence[AboutRank], alerts: Mapping[str, str]) -> None:
        """Called after each round of decisions. It only keeps them: there are more rounds than scrapes."""
        self._latest = world, decided, alerts
        self._round.set(time.time())

    def _show(self, world: World, decided: Sequence[AboutRank], alerts: Mapping[str, str]) -> None:
        states = Tally(node.state for node in world.nodes.values())
        for state in NodeState:
            self._nodes.labels(state=state).set(states[state])
        self._silent.set(sum(not node.reachable for node in world.nodes.values()))
        self._alarms.clear()
        for alarm in world.alarms:
            self._alarms.labels(node=alarm.node, check=alarm.check, severity=alarm.severity.name.lower()).inc()
        moving = {move.rank_uid for move in world.running}
        self._waiting.clear()
        for about in decided:
            on_its_way = about.rank.moving or about.rank.uid in moving
            if about.decision in (RankDecision.ALERT, RankDecision.WAIT) and not on_its_way:
                self._waiting.labels(node=about.rank.node).inc()
        self._ranks.set(len(world.ranks))
        self._running.set(len(world.running))
        self._alerts.set(len(alerts))
        self._orders.set(len(world.orders))
        spares = free_spares(world, self._policy.spares)
        usable = {name: gpus for name, (gpus, why) in spares.items() if not why}
        self._spares.set(len(spares))
        # A node without GPUs is a spare for ranks without GPUs.
        self._free.set(sum(gpus > 0 or not world.nodes[name].gpus for name, gpus in usable.items()))
        self._free_gpus.set(sum(usable.values()))

    async def exposition(self) -> tuple[str, bytes]:
        """The content type and the text, for MetricsServer."""
        return CONTENT_TYPE_LATEST, self.text()

    def text(self) -> bytes:
        if self._latest is not None:
            self._show(*self._latest)
            self._latest = None
        return generate_latest(self.registry)


def _label(outcome: str) -> str:
    return outcome.replace(" ", "_")
