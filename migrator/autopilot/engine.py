"""The loop of the autopilot: follows every node, decides, and carries the decisions out.

Invariant: what is decided depends only on the store, on what the nodes said last, on the policy and on the time. So a restart
changes nothing but the time. Before the first decision every move that is recorded as intended is settled, or known to be
waited for. The caller holds the actor's lock (actor.py).

A verb that finds no autopilot runs this loop too, for one order only: then nothing else is moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import Any

from migrator.autopilot import maintenance, mover, preempt, silence, validation
from migrator.autopilot.decide import NodeDecision, RankDecision
from migrator.autopilot.facts import AboutRank, about_node, about_ranks, intended, proposed
from migrator.autopilot.hurrying import Hurrying, kept_by_others
from migrator.autopilot.maintenance import MaintenanceDecision, about_maintenance, window_at
from migrator.autopilot.model import Move, MoveState, Node, NodeState, Order, ProposalState, Rank
from migrator.autopilot.pace import Pace
from migrator.autopilot.policy import Policy
from migrator.autopilot.progress_feed import ProgressFeed
from migrator.autopilot.store import Store
from migrator.autopilot.suspender import Suspender
from migrator.autopilot.watcher import Watcher, believed
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from migrator.results import Event
from snapshotd.api.errors import SnapshotError, WrongState

log = logging.getLogger(__name__)

#: How long nothing is decided at most. A change of a node or of the store is noticed earlier.
TICK_S = 1.0
#: After a round nothing is decided for as long as the round took, but not longer than this.
MOST_PAUSE_S = 0.25
#: The world of a round is shown for so many times as long as it took to gather it: some milliseconds, or half a second.
KEPT_FACTOR = 8.0
#: How long the first answers of all nodes are waited for.
FIRST_S = 15.0
_STATES = {
    NodeDecision.SUSPECT: NodeState.SUSPECT,
    NodeDecision.CLEAR: NodeState.HEALTHY,
    NodeDecision.TAINT: NodeState.TAINTED,
    NodeDecision.DRAIN: NodeState.DRAINING,
    NodeDecision.DRAINED: NodeState.DRAINED,
    NodeDecision.REPAIRING: NodeState.REPAIRING,
    NodeDecision.TRUST: NodeState.HEALTHY,
}


class Engine:
    """One cluster. `on_phase` gets the id of a move and its events; `on_round` what was known, decided and alerted.

    With `leads` false another autopilot acts: then nothing is recorded, and only `follow` may be called.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        store: Store,
        *,
        only_order: int = 0,
        leads: bool = True,
        on_phase: Callable[[str, Event], None] = lambda move, event: None,
        on_round: Callable[[World, list[AboutRank], dict[str, str]], None] = lambda world, decided, alerts: None,
    ) -> None:
        # Only an autopilot that goes on running can resume a job later.
        self.policy = policy.without_suspending() if only_order else policy
        self.cluster, self.store, self.only_order = cluster, store, only_order
        self.on_phase, self.on_round = on_phase, on_round
        self._wake = asyncio.Event()
        self.watchers = {node: Watcher(cluster, node, store, self._wake.set, records=leads) for node in cluster.nodes}
        self._moving: dict[str, asyncio.Task[None]] = {}  # by the id of the move
        self._validating: dict[int, asyncio.Task[None]] = {}  # by the id of the order
        self._latest: tuple[World, float] | None = None  # of the last round, and until when viewers get it
        self._suspender = Suspender(cluster, self.policy, store, self._look_at)
        self._silence = silence.Silence(cluster, store)
        self._hurrying = Hurrying(cluster)
        self._progress = ProgressFeed(cluster, policy, store, self.watchers)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, or the only order has ended. Moves in progress are then brought to their end."""
        stopped = asyncio.create_task(stop.wait())
        stopped.add_done_callback(lambda _: self._wake.set())
        watching = [asyncio.create_task(watcher.run()) for watcher in self.watchers.values()]
        if not self.only_order:
            await self._progress.resume()
            watching += self._progress.start()
        try:
            # Without this, a spare that has not answered yet would lead to an alert.
            deadline = time.monotonic() + FIRST_S
            while not stop.is_set() and self._unanswered() and time.monotonic() < deadline:
                await self._sleep(watching)
            while not stop.is_set() and not await self._is_done():
                began_s = time.monotonic()
                await self._round()
                # So that rounds of a large cluster with many signals leave time for the nodes' answers and the page.
                await asyncio.sleep(min(MOST_PAUSE_S, time.monotonic() - began_s))
                await self._sleep(watching)
            await asyncio.gather(*self._moving.values(), *self._suspender.tasks.values())
        finally:
            acting = [*self._moving.values(), *self._suspender.tasks.values(), *self._validating.values()]
            tasks = [stopped, *watching, *acting, *self._hurrying.tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def follow(self, stop: asyncio.Event) -> None:
        """Until `stop` is set: asks the nodes, so that viewers see them. Another autopilot decides, or none does."""
        watching = [asyncio.create_task(watcher.run()) for watcher in self.watchers.values()]
        try:
            while not stop.is_set():
                self.on_round(await self.world(), [], await self.store.alerts())
                await self._sleep(watching)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def take_over(self, before: Engine) -> None:
        """Knows which nodes were silent for another one. Their first answers are not waited for."""
        for name, watcher in before.watchers.items():
            self.watchers[name].error, self.watchers[name].silent_since = watcher.error, watcher.silent_since

    async def first_answers(self) -> None:
        """Waits until every watched node has answered or failed to."""
        while self._unanswered():
            await self._wake.wait()
            self._wake.clear()

    def _unanswered(self) -> bool:
        return any(one.sighting is None and one.error is None for one in self.watchers.values())

    async def _is_done(self) -> bool:
        return bool(self.only_order) and (await self.store.order(self.only_order)).ended_unix_s > 0

    async def _sleep(self, watching: list[asyncio.Task[None]]) -> None:
        for task in [*watching, *self._validating.values(), *self._hurrying.tasks.values()]:
            if task.done():
                task.result()  # a defect there must not leave a node unwatched
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    # ---------------------------------------------------------------- one round

    async def _round(self) -> None:
        await self._settle()
        await self._silence.look(self.watchers, self.policy.unreachable_s)
        began_s = time.monotonic()
        world = await self.world()
        cost_s = time.monotonic() - began_s
        if not self.only_order and await self._progress.update(world):
            world = await self.world()
        late = {} if self.only_order else await self._about_calendar(world)
        world, alerts = await self._about_nodes(world)
        alerts |= late
        self._latest = world, time.monotonic() + KEPT_FACTOR * cost_s
        decided = about_ranks(world, self.policy, self.store.now())
        data: dict[str, dict[str, Any]] = {}
        if self.only_order:
            decided = [about for about in decided if about.why.order == self.only_order]
        for about in decided:
            if about.suspends is not None:
                await self._suspender.begin(about.suspends)
            if about.decision is RankDecision.MOVE:
                await self._begin(world, about)
            elif about.decision is RankDecision.ALERT and not _may_stay(world, about):
                subject = f"rank {about.rank.rank} of {about.rank.job_key} on {about.rank.node}"
                alerts[subject], data[subject] = about.reason, _for_the_report(world, about)
            if about.look_at:
                self.watchers[about.look_at].look_now()
        self._hurrying.only(kept_by_others(world, self.policy, decided, self.store.now()))
        await self._about_orders(world, decided)
        alerts |= await self._propose(world, decided)
        if not self.only_order:
            acts = any(about.decision is RankDecision.MOVE or about.suspends is not None for about in decided)
            alerts |= await self._suspender.about(world, decided, idle=not acts)
            await self.store.set_alerts(alerts, data)
        self.on_round(world, decided, alerts)

    def pace(self, job_key: str) -> Pace | None:
        """For viewers: how fast a job was during the last minutes."""
        return self._progress.jobs.pace(job_key)

    async def shown_world(self) -> World:
        """For viewers: that of the last round, for a while that depends on what it costs to gather a new one."""
        if self._latest is not None and time.monotonic() < self._latest[1]:
            return self._latest[0]
        return await self.world()

    def notices(self) -> dict[str, str]:
        """What the page shows about this autopilot itself: nothing, because it is the only one."""
        return {}

    async def world(self) -> World:
        """Everything that is known now."""
        now = self.store.now()
        breaker = self.policy.breaker
        window = max(breaker.window_s, breaker.rank_window_s, breaker.back_off_s, preempt.KEPT_S)
        stored = await self.store.load(now - window)
        suspensions = await self.store.suspensions(now - window)
        ended: dict[str, list[Move]] = {}  # by rank
        for move in (*stored.moves, *(move for one in suspensions for move in one.moves())):
            if move.state is not MoveState.INTENDED:
                ended.setdefault(move.rank_uid, []).append(move)
        nodes: dict[str, Node] = {}
        ranks: list[tuple[float, Rank]] = []  # with the time of the answer
        for name, watcher in self.watchers.items():
            seen, record = watcher.sighting, stored.nodes.get(name)
            node = seen.node if seen is not None else Node(name, labels=self.cluster.labels.get(name, {}), seen=False)
            if record is not None:
                node = replace(node, state=record.state, reason=record.reason, since_unix_s=record.since_unix_s)
            asked = seen.asked_unix_s if seen is not None else 0.0
            found = window_at(self.policy, name, now)
            until = found.end if found is not None else ""
            nodes[name] = replace(node, reachable=watcher.error is None, asked_unix_s=asked, maintenance=until)
            for listed in seen.ranks if seen is not None else ():
                # What the node said before a move of the rank ended may be wrong by now: wait for its next answer.
                later = [
                    move.id
                    for move in ended.get(listed.uid, ())
                    if name in (move.source, move.target) and move.ended_unix_s >= asked
                ]
                ranks.append((asked, replace(listed, moving=listed.moving or later[-1]) if later else listed))
        alarms = tuple(alarm for alarm in stored.alarms if alarm.node in nodes)
        found_ranks = believed(nodes, ranks)
        return World(nodes, alarms, found_ranks, stored.moves, stored.orders, stored.proposals, suspensions)

    async def _about_nodes(self, world: World) -> tuple[World, dict[str, str]]:
        """Changes the states of nodes. Returns the world after that, and alerts.

        They are decided one after the other, because each change counts for the next one's limits.
        """
        alerts: dict[str, str] = {}
        changes: dict[str, tuple[NodeState, NodeState, str]] = {}
        nodes, now = dict(world.nodes), self.store.now()
        changed = replace(world, nodes=nodes)  # `nodes` changes below
        for name in world.nodes:
            about = about_node(changed, self.policy, nodes[name], now)
            if about.decision is NodeDecision.ALERT:
                alerts[name] = about.reason
            elif about.decision in _STATES and (nodes[name].seen or not nodes[name].reachable):
                state = _STATES[about.decision]
                changes[name] = nodes[name].state, state, about.reason
                nodes[name] = replace(nodes[name], state=state, reason=about.reason, since_unix_s=now)
        if changes:
            await self.store.set_nodes(changes)
        return changed, alerts

    async def _about_calendar(self, world: World) -> dict[str, str]:
        """Gives the orders that the maintenance calendar asks for. The next round carries them out. Returns alerts."""
        alerts: dict[str, str] = {}
        last = await self.store.last_orders()
        calendars = {name for name, order in last.items() if order.by == maintenance.CALENDAR}
        for name, node in world.nodes.items() if self.policy.maintenance or calendars else ():
            decision, reason = about_maintenance(world, self.policy, name, last.get(name), self.store.now())
            if decision is MaintenanceDecision.ALERT:
                alerts[name] = reason
            elif decision is not MaintenanceDecision.KEEP and node.seen:
                states = {
                    MaintenanceDecision.DRAIN: NodeState.DRAINING,
                    MaintenanceDecision.RETURN: NodeState.VALIDATING,
                }
                order = Order(0, decision.value, name, reason=reason, by=maintenance.CALENDAR)
                with contextlib.suppress(WrongState):  # an operator was faster
                    await self.store.give_order(order, states[decision])
                self._wake.set()
        return alerts

    async def _propose(self, world: World, decided: list[AboutRank]) -> dict[str, str]:
        """Records what an operator must approve. Returns alerts about what was not answered yet."""
        wanted = proposed(world, self.policy, decided, self.store.now())
        known = await self.store.set_proposals(wanted, end_others=not self.only_order)
        return {
            f"proposal {one.id}": f"{one.what}? {one.why}; {one.waits}"
            for one in known
            if one.state is ProposalState.OPEN
        }

    async def _begin(self, world: World, about: AboutRank) -> None:
        """Records the intent, and only then begins."""
        move = intended(world, about, f"m-{secrets.token_hex(6)}", self.store.now())
        await self.store.intend(move)
        self._moving[move.id] = asyncio.create_task(self._carry_out(move))

    async def _carry_out(self, move: Move) -> None:
        await mover.carry_out(self.cluster, self.store, move, lambda event: self.on_phase(move.id, event))
        self._look_again(move)

    def _look_again(self, move: Move) -> None:
        self._look_at((move.source, move.target))

    def _look_at(self, names: Collection[str]) -> None:
        for name in names:
            if name in self.watchers:
                self.watchers[name].look_now()
        self._wake.set()

    async def _settle(self) -> None:
        """Finds out about intended moves that no task of this process drives: after a restart, or a lost outcome."""
        await self._suspender.settle()
        for move_id, task in list(self._moving.items()):
            if task.done():
                del self._moving[move_id]
                task.result()
        for move in await self.store.intended():
            if move.id not in self._moving:
                try:
                    if await mover.settle(self.cluster, self.store, move):
                        self._look_again(move)
                except SnapshotError as error:
                    log.warning("move %s is not settled yet: %s", move.id, error.message)

    # ---------------------------------------------------------------- orders

    async def _about_orders(self, world: World, decided: list[AboutRank]) -> None:
        for order in world.orders:
            if self.only_order not in (0, order.id):
                continue
            node = world.nodes.get(order.node)
            if order.kind == "rebalance":
                await self._end_if_done(order, None, world, decided)
            elif node is None:
                await self.store.end_order(order.id, f"{order.node} is not in {self.cluster.origin}")
            elif order.kind == "return" and node.state is NodeState.VALIDATING:
                if order.id not in self._validating:
                    self._validating[order.id] = asyncio.create_task(self._validate(order))
            elif order.id not in self._validating or self._validating[order.id].done():
                await self._end_if_done(order, node, world, decided)

    async def _end_if_done(self, order: Order, node: Node | None, world: World, decided: list[AboutRank]) -> None:
        """Ends an order if every rank has moved, or none of the others can be moved now."""
        mine = [about for about in decided if about.why.order == order.id]
        unasked = [name for name, one in world.nodes.items() if one.reachable and one.asked_unix_s < order.since_unix_s]
        for name in unasked:
            self.watchers[name].look_now()
        if unasked or any(about.decision in (RankDecision.MOVE, RankDecision.WAIT) for about in mine):
            return
        if any(move.order == order.id for move in world.running):
            return
        draining = node is not None and node.state is NodeState.DRAINING and node.reachable
        if node is not None and draining and not any(r.node == node.name for r in world.ranks):
            # Its last rank was seen to be gone in the middle of this round: the next one finds that it is drained.
            self.watchers[node.name].look_now()
            self._wake.set()
            return
        moves = await self.store.moves_of_order(order.id)
        all_moved = [move for move in moves if move.state is MoveState.MOVED]
        moved = sum(not move.makes_room_for for move in all_moved)
        left = [f"rank {about.rank.rank} of {about.rank.job} stays: {about.reason}" for about in mine]
        if order.kind == "move":
            left += [move.result for move in moves if move.state is not MoveState.MOVED and move.result]
            if not moves and not left:
                left.append(f"the rank is not on {order.node} any more")
        if node is not None and order.kind != "return" and not node.reachable:
            left.append("the node does not answer")
        if others := len(all_moved) - moved:
            left.insert(0, f"{others} of lower priority moved out of the way")
        left[:0] = [f"job {one.job} suspended" for one in world.suspensions if one.order == order.id and one.counts]
        summary = "; ".join([f"{moved} rank{'' if moved == 1 else 's'} moved", *left])
        await self.store.end_order(order.id, summary)

    async def _validate(self, order: Order) -> None:
        # The node's own alarms are cleared there too. A sender that still sees the cause reports it again.
        await self.store.clear_signals(order.node, order.by or "an operator")
        wrong = await validation.problems(self.cluster, order.node, self.policy.validation)
        if wrong:
            await self.store.set_node(order.node, NodeState.REPAIRING, f"validation failed: {'; '.join(wrong)}")
            await self.store.end_order(order.id, f"validation failed: {'; '.join(wrong)}")
        else:
            await self.store.set_node(order.node, NodeState.RETURNED, "validation passed")
        self.watchers[order.node].look_now()
        self._wake.set()


def _may_stay(world: World, about: AboutRank) -> bool:
    """Whether a rank that cannot be moved is fine where it is: who gave the order learns why it was not moved."""
    kind = next((order.kind for order in world.orders if order.id == about.why.order), "")
    return kind in ("move", "rebalance")


def _for_the_report(world: World, about: AboutRank) -> dict[str, Any]:
    """What the report needs to know about a rank that could not be moved: the same as about an intended move."""
    named = ("rank_uid", "job_key", "rank", "source", "cause", "cause_class", "detected_unix_s", "job_gpus")
    would_be = asdict(intended(world, about, "", 0.0))
    return {name: would_be[name] for name in named}
