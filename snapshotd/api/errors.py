"""Every error a person can meet: what it is called, what it exits with, and whether asking again is safe.

Invariant: an error that crosses a boundary (wire, command line) is one of these classes, carries a sentence for the
person who reads it at 3 a.m., a remedy, and where the rank is now. Foreign errors (OSError, grpc, criu) are translated
once, where they enter, with ``raise … from``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import ClassVar

import grpc


class Where(StrEnum):
    """Where the rank is after an error: the first thing an operator needs to know."""

    SOURCE_RUNNING = "running on source"
    SOURCE_FROZEN = "frozen on source"
    TARGET_HELD = "held on target"
    TARGET_RUNNING = "running on target"
    ENDED = "ended"
    UNKNOWN = "unknown"
    UNTOUCHED = "not touched"


class SnapshotError(Exception):
    """Base of the taxonomy: a message, a remedy, and where the rank is."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retry_safe: ClassVar[bool] = False
    remedy: ClassVar[str] = "this is a defect: keep the daemon's log of this move and report it"

    def __init__(self, message: str, *, remedy: str = "", where: Where = Where.UNTOUCHED) -> None:
        super().__init__(message)
        self.message = message
        self.advice = remedy or type(self).remedy
        self.where = where

    def to_wire(self) -> bytes:
        return json.dumps(
            {"code": self.code, "message": self.message, "remedy": self.advice, "where": self.where.value}
        ).encode()


class Internal(SnapshotError):
    """Something that should not happen did."""


class Usage(SnapshotError):
    code, exit_code, status = "usage", 2, grpc.StatusCode.INVALID_ARGUMENT
    remedy = "see --help"


class BadConfig(SnapshotError):
    code, exit_code, status = "bad-config", 3, grpc.StatusCode.FAILED_PRECONDITION
    remedy = "correct the file named above; all its errors are listed"


class Refused(SnapshotError):
    """Preflight said no. Nothing was paused."""

    code, exit_code, status = "refused", 10, grpc.StatusCode.FAILED_PRECONDITION
    remedy = "follow the remedy beside each refused check, then try again"


class Undone(SnapshotError):
    """The move failed before COMMIT and was undone: the rank goes on at the source."""

    code, exit_code, status, retry_safe = "undone", 11, grpc.StatusCode.ABORTED, True
    remedy = "the job goes on at the source; a plain retry is safe"


class Unreachable(SnapshotError):
    code, exit_code, status, retry_safe = "unreachable", 12, grpc.StatusCode.UNAVAILABLE, True
    remedy = "check that snapshotd runs on that node (systemctl status snapshotd) and that its port is open"


class OutcomeUnknown(SnapshotError):
    """The outcome could not be learned. The daemons settle it alone; at most one copy runs meanwhile."""

    code, exit_code, status = "unknown", 13, grpc.StatusCode.UNKNOWN
    remedy = (
        "the daemons settle it alone when they reach each other; `migrator status` shows it, `migrator recover` helps"
    )


class NotFound(SnapshotError):
    code, exit_code, status = "not-found", 14, grpc.StatusCode.NOT_FOUND
    remedy = "`migrator ps` lists the ranks, `migrator nodes` the nodes, `migrator history` the moves"


class Ambiguous(SnapshotError):
    code, exit_code, status = "ambiguous", 15, grpc.StatusCode.FAILED_PRECONDITION
    remedy = "name the job with --job"


class Busy(SnapshotError):
    """The rank, or what the move needs, is taken by another move."""

    code, exit_code, status, retry_safe = "busy", 16, grpc.StatusCode.FAILED_PRECONDITION, True
    remedy = "wait for the other move (`migrator status`) or finish it with `migrator recover`"


class Denied(SnapshotError):
    """The certificate is good, but not for this."""

    code, exit_code, status = "denied", 17, grpc.StatusCode.PERMISSION_DENIED
    remedy = "use an operator's certificate (`migrator pki operator NAME`)"


class Full(SnapshotError):
    code, exit_code, status, retry_safe = "full", 18, grpc.StatusCode.RESOURCE_EXHAUSTED, True
    remedy = "free memory on that node or choose another one"


class Damaged(SnapshotError):
    """Bytes of an image did not arrive as they were sent, or a message is not what it should be."""

    code, exit_code, status, retry_safe = "damaged", 19, grpc.StatusCode.DATA_LOSS, True
    remedy = "a plain retry is safe; if it happens again, check the nodes' memory and network"


class CriuFailed(SnapshotError):
    """CRIU said no; the message holds the lines of its log that say why."""

    code, exit_code, status = "criu-failed", 20, grpc.StatusCode.ABORTED
    remedy = "the quoted lines of CRIU's log name the resource; the README's table of what moves says what to do"


class RankGone(SnapshotError):
    """The rank ended while it was being moved."""

    code, exit_code, status = "rank-gone", 21, grpc.StatusCode.ABORTED
    remedy = "its exit status went to whoever started it; there is nothing left to move"


class Timeout(SnapshotError):
    code, exit_code, status, retry_safe = "timeout", 22, grpc.StatusCode.DEADLINE_EXCEEDED, True
    remedy = "try again, with a larger --timeout if the rank is large"


class WrongState(SnapshotError):
    """A step was asked for that the move's state does not allow."""

    code, exit_code, status = "wrong-state", 23, grpc.StatusCode.FAILED_PRECONDITION
    remedy = "`migrator status MOVE` says where the move stands"


class GpuFailed(SnapshotError):
    """The CUDA driver said no, or did not answer; the message holds its own name for the error."""

    code, exit_code, status = "gpu-failed", 24, grpc.StatusCode.ABORTED
    remedy = "the driver's error name and `nvidia-smi` on that node say more; a plain retry is safe while the job runs"


class NcclFailed(SnapshotError):
    """NCCL, or the shim in front of it, said no; the message names the process and the communicator."""

    code, exit_code, status = "nccl-failed", 25, grpc.StatusCode.ABORTED
    remedy = "the job goes on with its communicators as they were; a plain retry is safe"


def _subclasses(cls: type[SnapshotError]) -> list[type[SnapshotError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]


BY_CODE: dict[str, type[SnapshotError]] = {cls.code: cls for cls in _subclasses(SnapshotError)}

#: The trailing metadata that carries an error's wire form next to gRPC's own status.
WIRE_KEY = "snapshotd-error-bin"


def from_wire(blob: bytes) -> SnapshotError:
    """The error another daemon raised, as the same class. A blob that makes no sense is an Internal error."""
    try:
        fields = json.loads(blob)
        cls = BY_CODE.get(str(fields["code"]), Internal)
        return cls(str(fields["message"]), remedy=str(fields["remedy"]), where=Where(fields["where"]))
    except (ValueError, KeyError, TypeError):
        return Internal(f"a daemon answered with an error that makes no sense: {blob[:200]!r}")
