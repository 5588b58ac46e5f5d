"""The record in numbers: every interruption with its cause, decision and pause, and what moving ranks has saved. Pure.

An interruption is one rank that had to leave its node for one cause, or a job that was rolled back, or suspended to make
room for a rank. It is resolved without lost progress if the rank was moved: a move continues in the middle of a step. A
rollback is not: work was lost. Nor is a suspension: the time until the job is resumed is lost. Everything here is computed
from the records of the event log, which can be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from migrator.autopilot.chain import Record
from migrator.autopilot.model import OUT, MoveState, NodeState
from migrator.autopilot.suspension import SuspensionState

CLASSES = ("hardware", "network", "planned", "software", "unknown")
ALL_RANKS = -1
ROLLED_BACK = "rolled back"
SUSPENDED = "suspended"
_UP = {NodeState.HEALTHY, NodeState.RETURNED, NodeState.SUSPECT}


@dataclass
class Interruption:
    rank_uid: str
    job: str
    rank: int  # ALL_RANKS: the whole job
    node: str
    cause: str
    cause_class: str
    detected_unix_s: float
    decided_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    outcome: str = "waiting"  # moved, lost, moving, not moved, rolled back, (not) suspended, or waiting
    target: str = ""
    attempts: int = 0
    pause_s: float = 0.0
    gpus: int = 0
    text: str = ""  # the reason of the decision, or why nothing could be done
    lost_s: float | None = (
        0.0  # of a rollback: the work that was lost (None: unknown how much); of a suspension: the time
    )
    moves: list[str] = field(default_factory=list)

    @property
    def gpu_seconds(self) -> float:
        """The time for which the GPUs of the job waited."""
        return self.pause_s * self.gpus

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gpu_seconds": round(self.gpu_seconds, 3)}


@dataclass(frozen=True)
class Share:
    """Interruptions of one class: all of them, and those resolved without lost progress."""

    all: int
    resolved: int

    @property
    def percent(self) -> float | None:
        return round(100 * self.resolved / self.all, 1) if self.all else None

    def to_json(self) -> dict[str, Any]:
        return {"all": self.all, "resolved": self.resolved, "percent": self.percent}


@dataclass(frozen=True)
class NodeTimes:
    node: str
    failures: int  # times that it was taken out of use
    mtbf_s: float | None  # observed time per failure
    mttr_s: float | None  # mean time until it was back in use


@dataclass(frozen=True)
class Report:
    since_unix_s: float
    until_unix_s: float
    interruptions: list[Interruption]
    by_class: dict[str, Share]
    total: Share
    without_software: Share
    gpu_seconds: float
    saved_gpu_hours: float
    checkpoint_minutes: float
    restart_minutes: float
    nodes: list[NodeTimes]

    @property
    def rollbacks(self) -> list[Interruption]:
        return [one for one in self.interruptions if one.outcome == ROLLED_BACK]

    @property
    def suspensions(self) -> list[Interruption]:
        return [one for one in self.interruptions if one.outcome == SUSPENDED]

    def to_json(self) -> dict[str, Any]:
        return {
            "since_unix_s": round(self.since_unix_s, 3),
            "until_unix_s": round(self.until_unix_s, 3),
            "resolved_without_lost_progress": self.total.to_json(),
            "without_software": self.without_software.to_json(),
            "by_class": {name: share.to_json() for name, share in self.by_class.items()},
            "gpu_seconds": round(self.gpu_seconds, 3),
            "saved_gpu_hours": round(self.saved_gpu_hours, 3),
            "rollbacks": len(self.rollbacks),
            "suspensions": len(self.suspensions),
            "lost_s": round(sum(one.lost_s or 0.0 for one in (*self.rollbacks, *self.suspensions)), 3),
            "checkpoint_minutes": self.checkpoint_minutes,
            "restart_minutes": self.restart_minutes,
            "nodes": [asdict(node) for node in self.nodes],
            "interruptions": [one.to_json() for one in self.interruptions],
        }


def build(
    records: Sequence[Record],
    *,
    since_unix_s: float,
    until_unix_s: float,
    job: str = "",
    checkpoint_minutes: float = 60.0,
    restart_minutes: float = 10.0,
) -> Report:
    """The report of the interruptions that were detected or decided in this time."""
    found = [
        one
        for one in interruptions(records)
        if max(one.decided_unix_s, one.detected_unix_s, one.ended_unix_s) >= since_unix_s
        and job in ("", one.job, one.job.partition("/")[2])
    ]
    for one in found:
        if one.outcome == SUSPENDED and not one.ended_unix_s:
            one.pause_s = one.lost_s = round(max(0.0, until_unix_s - one.decided_unix_s), 3)
    by_class = {name: _share(one for one in found if one.cause_class == name) for name in CLASSES}
    lost_minutes = checkpoint_minutes / 2 + restart_minutes  # on average half an interval is computed again
    saved = sum(
        one.gpus * (lost_minutes * 60 - one.pause_s) / 3600
        for one in found
        if one.outcome == "moved" and one.cause_class != "planned"
    )
    return Report(
        since_unix_s,
        until_unix_s,
        found,
        by_class,
        _share(found),
        _share(one for one in found if one.cause_class != "software"),
        sum(one.gpu_seconds for one in found),
        saved,
        checkpoint_minutes,
        restart_minutes,
        node_times(records, since_unix_s, until_unix_s),
    )


def interruptions(records: Iterable[Record]) -> list[Interruption]:
    """Every rank that had to leave its node, in the order of the records. Attempts for the same cause are one."""
    found: dict[tuple[str, str, str], Interruption] = {}
    by_move: dict[str, Interruption] = {}
    waiting: dict[str, Interruption] = {}  # by the subject of an alert
    for record in records:
        data = record.data
        if record.kind == "intent":
            one = found.setdefault(_key(data), _new(data))
            one.decided_unix_s = one.decided_unix_s or record.unix_s
            one.outcome, one.target, one.text = "moving", data["target"], data["reason"]
            one.gpus, one.attempts = data["job_gpus"], one.attempts + 1
            one.moves.append(data["id"])
            by_move[data["id"]] = one
        elif record.kind == "result" and data["id"] in by_move:
            one = by_move[data["id"]]
            known = {MoveState.MOVED.value: "moved", MoveState.LOST.value: "lost"}
            one.outcome, one.ended_unix_s = known.get(data["state"], "not moved"), record.unix_s
            one.pause_s += data["pause_s"]
            one.text = data["result"] or one.text
        elif record.kind == "rollback":
            found["", record.node, data["record"]] = _rolled_back(data)
        elif record.kind == "suspension":
            found["", "suspended", data["id"]] = _suspended(data, record.text)
        elif record.kind == "alert" and "rank_uid" in data:
            one = found.setdefault(_key(data), _new(data))
            one.text = record.text.partition(": ")[2]
            waiting[data["about"]] = one
        elif record.kind == "alert-over" and data["about"] in waiting:
            one = waiting.pop(data["about"])
            if one.outcome == "waiting":
                one.outcome, one.ended_unix_s = "not moved", record.unix_s
    return list(found.values())


def _key(data: dict[str, Any]) -> tuple[str, str, str]:
    return data["rank_uid"], data["source"], data["cause"]


def _new(data: dict[str, Any]) -> Interruption:
    return Interruption(
        rank_uid=data["rank_uid"],
        job=data["job_key"],
        rank=data["rank"],
        node=data["source"],
        cause=data["cause"],
        cause_class=data["cause_class"],
        detected_unix_s=data["detected_unix_s"],
    )


def _rolled_back(data: dict[str, Any]) -> Interruption:
    return Interruption(
        rank_uid="",
        job=data["job_key"],
        rank=ALL_RANKS,
        node="",
        cause=data["reason"],
        cause_class="unknown",
        detected_unix_s=max(0.0, data["ended_unix_s"] - data["down_s"]) if data["resumed"] else data["begun_unix_s"],
        decided_unix_s=data["begun_unix_s"],
        ended_unix_s=data["ended_unix_s"],
        outcome=ROLLED_BACK,
        pause_s=data["down_s"],
        text=data["text"],
        lost_s=data["lost_s"],
    )


def _suspended(data: dict[str, Any], text: str) -> Interruption:
    """What is lost of one that has not ended depends on when the report is made: see `build`."""
    failed = data["state"] in (SuspensionState.NOT_SUSPENDED, SuspensionState.NEVER_BEGAN)
    ended = data["ended_unix_s"]
    lost_s = round(max(0.0, ended - data["intended_unix_s"]), 3) if ended and not failed else 0.0
    resumed = data["state"] == SuspensionState.RESUMED
    return Interruption(
        rank_uid="",
        job=data["job_key"],
        rank=ALL_RANKS,
        node=data["node"],
        cause=data["reason"],
        cause_class="planned",
        detected_unix_s=data["intended_unix_s"],
        decided_unix_s=data["intended_unix_s"],
        ended_unix_s=ended,
        outcome="not suspended" if failed else SUSPENDED,
        target=", ".join(dict.fromkeys(rank["target"] for rank in data["ranks"])) if resumed else "",
        pause_s=lost_s,
        gpus=sum(len(rank["gpus"]) for rank in data["ranks"]),
        text=text.partition(": ")[2],
        lost_s=lost_s,
    )


def _share(found: Iterable[Interruption]) -> Share:
    outcomes = [one.outcome for one in found]
    return Share(len(outcomes), outcomes.count("moved"))


def node_times(records: Sequence[Record], since_unix_s: float, until_unix_s: float) -> list[NodeTimes]:
    """Failures of nodes, the worst node first. A planned drain by an operator is no failure."""
    began = max(since_unix_s, records[0].unix_s) if records else since_unix_s
    out: dict[str, float] = {}
    failures: dict[str, int] = {}
    repairs: dict[str, list[float]] = {}
    for record in records:
        if record.kind != "state" or record.unix_s < since_unix_s:
            continue
        state = NodeState(record.data["to"])
        if state in OUT and record.node not in out and record.data["by"] == "autopilot":
            out[record.node] = record.unix_s
            failures[record.node] = failures.get(record.node, 0) + 1
        elif state in _UP and record.node in out:
            repairs.setdefault(record.node, []).append(record.unix_s - out.pop(record.node))
    times = [
        NodeTimes(
            node,
            count,
            (until_unix_s - began) / count,
            sum(repairs[node]) / len(repairs[node]) if node in repairs else None,
        )
        for node, count in failures.items()
    ]
    return sorted(times, key=lambda one: (-one.failures, -(one.mttr_s or 0.0), one.node))
