"""The driver's data types: the request, the events of a move, and its result. The command line renders them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from migrator import formatting
from migrator.estimate import Estimate
from migrator.protocol import Verdict
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Where


@dataclass(frozen=True)
class MoveOptions:
    """One request of an operator."""

    rank: int | str  # its number in the job, or its id
    to: str
    job: str | None = None
    timeout_s: float | None = None
    gpu: str = ""  # the target's GPU to move to, by UUID or index; empty: any that fits
    lease_s: float = 30.0  # how long the source waits, before COMMIT, for a driver that does not renew the lease
    quiesce_timeout_s: float = 30.0  # how long the job may take to reach a point where all its ranks can wait
    user_id: int | None = None  # whose job it is; None: must be clear from the others
    move: str = ""  # id of the move, for a caller that records it first; empty: a new one
    source: str = ""  # the node that has the rank; empty: must be clear from what all nodes say
    precopy_percent: float = 0.0  # what the job may lose while its memory is sent before the pause; 0: it is not


@dataclass(frozen=True)
class Event:
    """An event of a running move: "phase-start", "phase-end", "bytes" or "note"."""

    kind: str
    phase: str
    seconds: float
    bytes: int
    bytes_expected: int
    text: str


#: The part of a move in which the target takes device memory over where it is (snapshotd/moves/device/takeover.py).
TAKE_OVER = "take-over"


@dataclass
class PhaseTime:
    name: str
    seconds: float
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": round(self.seconds, 4), "bytes": self.bytes}


@dataclass(frozen=True)
class CheckReport:
    source: str
    target: str
    rank: pb.Rank
    checks: list[pb.Check]
    estimate: Estimate | None = None  # if it was asked for

    @property
    def refused(self) -> bool:
        return any(check.verdict == pb.Check.REFUSE for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.rank.job,
            "user_id": self.rank.user_id,
            "rank": self.rank.rank,
            "source": self.source,
            "target": self.target,
            "movable": not self.refused,
            "checks": [
                {
                    "name": check.name,
                    "verdict": formatting.name_of(pb.Check.Verdict, check.verdict).lower(),
                    "reason": check.reason,
                    "remedy": check.remedy,
                }
                for check in self.checks
            ],
        } | ({"estimate": self.estimate.to_json()} if self.estimate is not None else {})


@dataclass(frozen=True)
class MoveResult:
    """How a move ended: the object that `migrator move --json` prints."""

    move: str
    job: str
    rank: int
    source: str
    target: str
    outcome: Verdict
    pause_s: float
    bytes: int
    phases: list[PhaseTime] = field(default_factory=list)
    reason: str = ""
    where: Where = Where.UNKNOWN
    error_code: str = ""
    remedy: str = ""
    exit_code: int = 0
    parts: list[PhaseTime] = field(default_factory=list)  # the parts of phases, with their times
    gpu_pairs: list[tuple[str, str]] = field(default_factory=list)  # (source's GPU, target's GPU)
    device_bytes: int = 0  # device memory that was moved
    device_bytes_left: int = 0  # free blocks of the caching allocator, released instead of sent
    longest_part: PhaseTime | None = None  # the longest of those inside the pause
    warnings: list[str] = field(default_factory=list)  # why earlier attempts were undone, or a slower method was used
    user_id: int = -1  # whose job it is
    attempts: int = 1  # more than one: the rank changed between preflight and the freeze of the earlier ones
    peers_stopped_s: float = 0.0  # the longest time for which a peer's process was stopped
    predicted_s: float = 0.0  # the pause that was predicted before the move; 0: none was
    precopied_bytes: int = 0  # memory that was sent before the pause, some of it several times

    @property
    def handed_over_bytes(self) -> int:
        """Device memory that the target took over on the same GPU: it was not sent."""
        return sum(part.bytes for part in self.parts if part.name == TAKE_OVER)

    def to_json(self) -> dict[str, Any]:
        return {
            "move": self.move,
            "job": self.job,
            "user_id": self.user_id,
            "rank": self.rank,
            "source": self.source,
            "target": self.target,
            "outcome": self.outcome.value,
            "attempts": self.attempts,
            "pause_s": round(self.pause_s, 4),
            "predicted_s": round(self.predicted_s, 4),
            "peers_stopped_s": round(self.peers_stopped_s, 6),
            "bytes": self.bytes,
            "precopied_bytes": self.precopied_bytes,
            "phases": [phase.to_json() for phase in self.phases],
            "parts": [part.to_json() for part in self.parts],
            "longest_part": self.longest_part.to_json() if self.longest_part is not None else None,
            "warnings": self.warnings,
            "gpus": [{"from": old, "to": new} for old, new in self.gpu_pairs],
            "device_bytes": self.device_bytes,
            "device_bytes_left": self.device_bytes_left,
            "handed_over_bytes": self.handed_over_bytes,
            "reason": self.reason,
            "where": self.where.value,
            "error": self.error_code,
            "remedy": self.remedy,
        }
