"""What the page shows, as values for JSON. Pure, except that `Phases` reads a clock.

Invariant: names and texts are passed on as they are. The page puts them into the document as text, never as HTML.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from migrator.autopilot.chain import Record
from migrator.autopilot.model import Alarm, Move, MoveState, Node, NodeState, Rank
from migrator.autopilot.policy import Spares
from migrator.autopilot.spares import free_spares
from migrator.autopilot.suspension import Suspension
from migrator.autopilot.world import World
from migrator.results import Event

#: Ended moves that are shown.
RECENT = 8


@dataclass
class _Phase:
    name: str
    since_s: float
    bytes: int = 0
    bytes_expected: int = 0
    bytes_per_s: float = 0.0


class Phases:
    """How far the moves are that this process drives, from the events of the driver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: dict[str, _Phase] = {}

    def note(self, move: str, event: Event) -> None:
        """Takes in one event of a move."""
        now = self._clock()
        if event.kind == "phase-start":
            self._now[move] = _Phase(event.phase, now)
        elif event.kind == "bytes":
            phase = self._now.get(move)
            if phase is None or phase.name != event.phase:
                phase = self._now[move] = _Phase(event.phase, now)
            phase.bytes, phase.bytes_expected = event.bytes, event.bytes_expected
            if now > phase.since_s:
                phase.bytes_per_s = event.bytes / (now - phase.since_s)

    def keep(self, moves: set[str]) -> None:
        """Forgets moves that have ended."""
        for move in self._now.keys() - moves:
            del self._now[move]

    def of(self, move: str) -> dict[str, Any]:
        phase = self._now.get(move)
        if phase is None:
            return {"phase": "", "bytes": 0, "bytes_expected": 0, "bytes_per_s": 0}
        return {
            "phase": phase.name,
            "bytes": phase.bytes,
            "bytes_expected": phase.bytes_expected,
            "bytes_per_s": round(phase.bytes_per_s),
        }


class Nodes:
    """What is shown of each node, as JSON. It is made again only if the node has changed: most of a thousand have not."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[Any, ...], msgspec.Raw]] = {}

    def of(self, node: Node, ranks: Sequence[Rank], alarms: Sequence[Alarm]) -> msgspec.Raw:
        # What _node() uses. Ranks and alarms that were not reported anew are the same objects, so this comparison is fast.
        place = (node.state, node.reason, node.since_unix_s, node.seen, node.reachable, node.dedicated, node.gpus)
        used = (place, ranks, alarms)
        known = self._made.get(node.name)
        if known is None or known[0] != used:
            known = used, msgspec.Raw(msgspec.json.encode(_node(node, ranks, alarms)))
            self._made[node.name] = known
        return known[1]


def state(
    world: World, alerts: Mapping[str, str], spares: Spares, phases: Phases, nodes: Nodes | None = None
) -> dict[str, Any]:
    """Everything but the timeline. It contains no current time, so that it changes only if something has changed."""
    nodes = nodes or Nodes()
    counts = Counter(node.state for node in world.nodes.values())
    found = free_spares(world, spares)
    ended = (move for move in world.moves if move.state is not MoveState.INTENDED)
    recent = sorted(ended, key=lambda move: move.ended_unix_s, reverse=True)
    return {
        "counts": {one.value: counts[one] for one in NodeState if counts[one]},
        "silent": sum(not (node.seen and node.reachable) for node in world.nodes.values()),
        "ranks": len(world.ranks),
        "nodes": [
            nodes.of(node, world.ranks_on(node.name), world.alarms_on(node.name)) for node in world.nodes.values()
        ],
        "moves": [_move(move, phases) for move in world.running],
        "recent": [_ended(move) for move in recent[:RECENT]],
        "suspended": [suspended(one) for one in world.suspensions if one.open],
        "orders": [
            {"id": order.id, "kind": order.kind, "node": order.node, "by": order.by, "reason": order.reason}
            for order in world.orders
        ],
        "proposals": [
            {
                "id": one.id,
                "what": one.what,
                "why": one.why,
                "node": one.node,
                "state": one.state.value,
                "by": one.by,
                "reason": one.reason,
            }
            for one in world.proposals
        ],
        "alerts": [{"about": about, "text": text} for about, text in alerts.items()],
        "spares": [{"node": name, "gpus_free": gpus, "unusable": why} for name, (gpus, why) in found.items()],
    }


def _node(node: Node, ranks: Sequence[Rank], alarms: Sequence[Alarm]) -> dict[str, Any]:
    index = {gpu.uuid: number for number, gpu in enumerate(node.gpus)}
    troubled = {alarm.subject for alarm in alarms}
    return {
        "name": node.name,
        "state": node.state.value,
        "reason": node.reason,
        "since_unix_s": round(node.since_unix_s),
        "answers": node.seen and node.reachable,
        "spare": node.dedicated,
        # One character for each GPU: an alarm, free, or in use.
        "gpus": "".join("!" if f"gpu:{gpu.uuid}" in troubled else "-" if gpu.free else "#" for gpu in node.gpus),
        "ranks": [
            {
                "job": rank.job,
                "rank": rank.rank,
                "user_id": rank.user_id,
                "gpus": sorted(index[uuid] for uuid in rank.gpus if uuid in index),
                "moving": bool(rank.moving),
            }
            for rank in sorted(ranks, key=lambda rank: (rank.job_key, rank.rank))
        ],
        "alarms": [
            {"check": one.check, "subject": one.subject, "severity": one.severity.name.lower(), "text": one.text}
            for one in alarms
        ],
    }


def _move(move: Move, phases: Phases) -> dict[str, Any]:
    return {**_what(move), "since_unix_s": round(move.intended_unix_s), **phases.of(move.id)}


def _ended(move: Move) -> dict[str, Any]:
    facts = {"state": move.state.value, "result": move.result, "pause_s": round(move.pause_s, 2)}
    return {**_what(move), **facts, "ended_unix_s": round(move.ended_unix_s)}


def suspended(one: Suspension) -> dict[str, Any]:
    """A job that is suspended, or is about to be or to come back."""
    return {
        "job": one.job,
        "user_id": one.user_id,
        "ranks": len(one.ranks),
        "state": one.state.value,
        "since_unix_s": round(one.suspended_unix_s or one.intended_unix_s),
        "reason": one.reason,
        "result": one.result,
    }


def _what(move: Move) -> dict[str, Any]:
    return {
        "id": move.id,
        "job": move.job_key.partition("/")[2],
        "rank": move.rank,
        "source": move.source,
        "target": move.target,
        "reason": move.reason,
    }


def line(record: Record) -> dict[str, Any]:
    """One line of the timeline."""
    return {
        "id": record.id,
        "unix_s": record.unix_s,
        "kind": record.kind,
        "node": record.node,
        "text": record.text,
        "by": str(record.data.get("by", "")),
        "failed": record.kind == "result" and record.data.get("state") != MoveState.MOVED,
    }
