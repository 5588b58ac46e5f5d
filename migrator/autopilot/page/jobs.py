"""What the page shows of one job, as values for JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from migrator.autopilot.model import Alarm, Move, NodeState, Rank
from migrator.autopilot.pace import POINT_S, Pace
from migrator.autopilot.page import view
from migrator.autopilot.report import Interruption
from migrator.autopilot.world import World

#: Ranks and moves that are shown at a time. Of a larger job, those in trouble come first; `find` reaches the others.
RANKS, MOVES = 256, 10


def job(
    key: str,
    find: str,
    world: World,
    pace: Pace | None,
    interruptions: Sequence[Interruption],
    records: list[dict[str, Any]],
) -> dict[str, Any]:
    """`find`: only ranks with this number, or on nodes whose name contains it."""
    user, _, name = key.partition("/")
    ranks = world.ranks_of(key)
    subjects = {f"rank:{rank.uid}": rank for rank in ranks}
    alarms = [alarm for alarm in world.alarms if alarm.subject in subjects]
    named = {alarm.subject for alarm in alarms}
    found = [rank for rank in ranks if find in ("", str(rank.rank)) or find in rank.node]
    found.sort(key=lambda rank: (not _troubled(world, rank, named), rank.rank, rank.node))
    moves = [_running(move) for move in world.running if move.job_key == key]
    ended = [_ended(one) for one in reversed(interruptions[-MOVES:]) if one.outcome != "moving"]
    suspended = [view.suspended(one) for one in world.suspensions if one.open and one.job_key == key]
    return {
        "key": key,
        "name": name,
        "user": user,
        "all_ranks": len(ranks),
        "found_ranks": len(found),
        "nodes": len({rank.node for rank in ranks}),
        "away": sum(bool(rank.home) and rank.home != rank.node for rank in ranks),
        "suspended": suspended[-1] if suspended else None,
        "ranks": [_rank(world, rank) for rank in found[:RANKS]],
        "pace": _pace(pace),
        "stragglers": [_straggler(alarm, subjects[alarm.subject]) for alarm in alarms if alarm.loss is not None],
        "alarms": [_alarm(alarm, subjects[alarm.subject]) for alarm in alarms if alarm.loss is None],
        "moves": [*moves, *ended],
        "records": records,
    }


def _troubled(world: World, rank: Rank, named: set[str]) -> bool:
    node = world.nodes[rank.node]
    return node.state is not NodeState.HEALTHY or not node.reachable or bool(rank.moving) or f"rank:{rank.uid}" in named


def _rank(world: World, rank: Rank) -> dict[str, Any]:
    node = world.nodes[rank.node]
    index = {gpu.uuid: number for number, gpu in enumerate(node.gpus)}
    order = world.order_to_move(rank)
    return {
        "uid": rank.uid,
        "rank": rank.rank,
        "node": rank.node,
        "node_state": node.state.value,
        "answers": node.seen and node.reachable,
        "home": rank.home,
        "gpus": sorted(index[uuid] for uuid in rank.gpus if uuid in index),
        "moving": bool(rank.moving) or any(one.rank_uid == rank.uid for one in world.running),
        "order": order.id if order is not None else 0,
    }


def _pace(pace: Pace | None) -> dict[str, Any] | None:
    if pace is None:
        return None
    period = pace.period
    return {
        "point_s": POINT_S,
        "points": [(round(unix_s), round(per_s, 3)) for unix_s, per_s in pace.points],
        "period_s": round(period.seconds, 2) if period is not None else None,
        "period_collectives": period.collectives if period is not None else None,
    }


def _straggler(alarm: Alarm, rank: Rank) -> dict[str, Any]:
    loss = alarm.loss
    assert loss is not None
    return {
        **_alarm(alarm, rank),
        "share": round(loss.share, 3),
        "lost_s": round(loss.lost_s),
        "usual_per_s": round(loss.usual_per_s, 3),
        "now_per_s": round(loss.now_per_s, 3),
        "confirmed": loss.confirmed,
    }


def _alarm(alarm: Alarm, rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": alarm.node,
        "check": alarm.check,
        "severity": alarm.severity.name.lower(),
        "text": alarm.text,
        "since_unix_s": round(alarm.since_unix_s),
    }


def _running(move: Move) -> dict[str, Any]:
    return {
        "rank": move.rank,
        "source": move.source,
        "target": move.target,
        "outcome": "moving",
        "pause_s": None,
        "unix_s": round(move.intended_unix_s),
        "text": move.reason,
    }


def _ended(one: Interruption) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "source": one.node,
        "target": one.target,
        "outcome": one.outcome,
        "pause_s": round(one.pause_s, 2) if one.pause_s else None,
        "unix_s": round(one.ended_unix_s or one.decided_unix_s or one.detected_unix_s),
        "text": one.text,
    }
