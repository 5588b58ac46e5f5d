"""Makes worlds for the tests of the autopilot's decisions."""

from __future__ import annotations

from typing import Any

from migrator.autopilot import policy
from migrator.autopilot.model import Alarm, Gpu, Move, MoveState, Node, NodeState, Proposal, Rank, Severity
from migrator.autopilot.world import World

NOW = 1_800_000_000.0
GIB = 1 << 30


def gpu(node: str, number: int, *, free: bool = True, model: str = "NVIDIA H200") -> Gpu:
    return Gpu(f"GPU-{node}-{number}", model, 141 * GIB, free)


def node(name: str, count: int = 0, **fields: Any) -> Node:
    """A node whose GPUs are all in use, or all free if it is called spare."""
    spare = name.startswith("spare")
    return Node(
        name,
        **{
            "labels": {"spare": "dedicated"} if spare else {},
            "gpus": tuple(gpu(name, number, free=spare) for number in range(count)),
            "driver": "580.1" if count else "",
            "memory_free_bytes": 512 * GIB,
            **fields,
        },
    )


def rank(number: int, on: str, job: str = "train", gpus: tuple[int, ...] = (), **fields: Any) -> Rank:
    uuids = tuple(f"GPU-{on}-{index}" for index in gpus)
    return Rank(f"{job}-{number}-{number:08x}", job, number, 1000, on, uuids, **{"memory_bytes": GIB, **fields})


def alarm(on: str, check: str = "gpu-ecc", subject: str = "host", **fields: Any) -> Alarm:
    values = {"severity": Severity.CRITICAL, "text": "it fails", "since_unix_s": NOW - 100, **fields}
    return Alarm(on, check, subject, **values)


def move(of: Rank, to: str, state: MoveState, ended_s_ago: float = 0.0, **fields: Any) -> Move:
    values = {
        "id": f"m-{len(to):06x}{int(ended_s_ago):06x}",
        "rank_uid": of.uid,
        "job_key": of.job_key,
        "rank": of.rank,
        "source": of.node,
        "target": to,
        "state": state,
        "cause": "a rule",
        "reason": "a reason",
        "intended_unix_s": NOW - ended_s_ago - 10,
        "ended_unix_s": 0.0 if state is MoveState.INTENDED else NOW - ended_s_ago,
        **fields,
    }
    return Move(**values)


def world(*parts: Any) -> World:
    """A world of these nodes, alarms, ranks and moves."""
    return World(
        {part.name: part for part in parts if isinstance(part, Node)},
        tuple(part for part in parts if isinstance(part, Alarm)),
        tuple(part for part in parts if isinstance(part, Rank)),
        tuple(part for part in parts if isinstance(part, Move)),
        tuple(part for part in parts if type(part).__name__ == "Order"),
        tuple(part for part in parts if isinstance(part, Proposal)),
    )


def acting(action: str = "move", **tables: Any) -> policy.Policy:
    """A policy with one rule that acts on every alarm."""
    rules = tables.pop("rules", [{"name": "all", "severity": "notice", "action": action}])
    tables.setdefault("breaker", {"nodes_percent": 50})
    return policy.from_values({"rules": rules, **tables}, "the test")


TAINTED = NodeState.TAINTED
