"""The error taxonomy: each class has a code, a gRPC status, an exit code, a remedy, and tells whether a retry is safe.

Invariant: an error that crosses a boundary (wire, command line) is an instance of one of these classes. It tells what
happened, where the rank is, and what to do. Foreign errors (OSError, grpc, criu) are translated once, where they enter,
with ``raise … from``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import ClassVar


class Where(StrEnum):
    """Where the rank is after an error, which an operator needs to know first. The values are part of the wire format."""

    SOURCE_RUNNING = "running on source"
    SOURCE_FROZEN = "frozen on source"
    TARGET_HELD = "held on target"
    TARGET_RUNNING = "running on target"
    SUSPENDED = "suspended"
    ENDED = "ended"
    UNKNOWN = "unknown"
    UNTOUCHED = "not touched"


class SnapshotError(Exception):
    """Base class: a message, a remedy (`advice`), and where the rank is."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    status: ClassVar[str] = "INTERNAL"  # the name of a gRPC status
    retry_safe: ClassVar[bool] = False
    remedy: ClassVar[str] = "this is a defect in snapshotd: save the daemon's log of this move and report it"

    def __init__(self, message: str, *, remedy: str = "", where: Where = Where.UNTOUCHED) -> None:
        # It may quote a file name, which can be any bytes; neither a frame nor a protobuf message could hold that.
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.advice = remedy or type(self).remedy
        self.where = where
        #: The node that it is of, if that is another one than the node that was asked; empty: not known, or this program.
        self.of_node = ""

    @property
    def headline(self) -> str:
        """The first line of the message. The message may be empty: it can come from another node."""
        return self.message.partition("\n")[0]

    def to_wire(self) -> bytes:
        fields = {"code": self.code, "message": self.message, "remedy": self.advice, "where": self.where.value}
        if self.of_node:
            fields["of_node"] = self.of_node
        return json.dumps(fields).encode()


class Internal(SnapshotError):
    """An invariant of this program does not hold."""


class Usage(SnapshotError):
    code, exit_code, status = "usage", 2, "INVALID_ARGUMENT"
    remedy = "see `migrator --help`"


class BadConfig(SnapshotError):
    code, exit_code, status = "bad-config", 3, "FAILED_PRECONDITION"
    remedy = "correct the file; all its problems are listed"


class Refused(SnapshotError):
    """Preflight refused the move. Nothing was paused."""

    code, exit_code, status = "refused", 10, "FAILED_PRECONDITION"
    remedy = "follow the remedy of each refused check, then retry"


class Changed(Refused):
    """A check refuses the rank although preflight did not: the rank has changed since. Another attempt checks it anew."""

    code, exit_code, retry_safe = "changed", 26, True
    remedy = "retry: preflight will then see what the rank has now"


class Undone(SnapshotError):
    """The move failed before COMMIT and was undone: the rank runs on the source."""

    code, exit_code, status, retry_safe = "undone", 11, "ABORTED", True
    remedy = "the rank runs on the source again; a retry is safe"


class Unreachable(SnapshotError):
    code, exit_code, status, retry_safe = "unreachable", 12, "UNAVAILABLE", True
    remedy = (
        "check on that node that snapshotd runs (`systemctl status snapshotd`) and that its port is open, then retry"
    )


class OutcomeUnknown(SnapshotError):
    """The outcome could not be determined. At most one copy runs, and the daemons settle the move by themselves."""

    code, exit_code, status = "unknown", 13, "UNKNOWN"
    remedy = (
        "do not start the rank by hand: the daemons settle the move once they reach each other; `migrator status` shows the"
        " outcome, `migrator recover` helps if a node is down"
    )


class NotFound(SnapshotError):
    code, exit_code, status = "not-found", 14, "NOT_FOUND"
    remedy = "`migrator ps` lists ranks, `migrator nodes` lists nodes, `migrator history` lists moves"


class Ambiguous(SnapshotError):
    code, exit_code, status = "ambiguous", 15, "FAILED_PRECONDITION"
    remedy = "select the job with --job, and its user with --user"


class Busy(SnapshotError):
    """The rank, or a resource that the move needs, is in use by another move."""

    code, exit_code, status, retry_safe = "busy", 16, "FAILED_PRECONDITION", True
    remedy = "wait until the other move has ended (`migrator status`), or end it with `migrator recover`; then retry"


class Denied(SnapshotError):
    """The certificate is valid, but does not allow this call."""

    code, exit_code, status = "denied", 17, "PERMISSION_DENIED"
    remedy = "use the certificate of an operator (`migrator pki operator NAME` creates one)"


class Full(SnapshotError):
    code, exit_code, status, retry_safe = "full", 18, "RESOURCE_EXHAUSTED", True
    remedy = "free memory on that node, or choose another node"


class Damaged(SnapshotError):
    """Data did not arrive as it was sent, or a message is malformed."""

    code, exit_code, status, retry_safe = "damaged", 19, "DATA_LOSS", True
    remedy = "a retry is safe; if it happens again, check the memory and the network of both nodes"


class Unreadable(Damaged):
    """An image that is kept on a node cannot be read, or is not what was stored. Another copy of it may be good."""

    code, exit_code, retry_safe = "unreadable", 27, False
    remedy = "check the disk of that node, and its kernel log"


class CriuFailed(SnapshotError):
    """CRIU failed. The message quotes the lines of its log that give the reason."""

    code, exit_code, status = "criu-failed", 20, "ABORTED"
    remedy = "the quoted lines of CRIU's log name the resource; docs/limits.md lists what can be moved, and what to do"


class RankGone(SnapshotError):
    """The rank ended while it was being moved."""

    code, exit_code, status = "rank-gone", 21, "ABORTED"
    remedy = "there is nothing left to move; the launcher has received its exit status"


class Timeout(SnapshotError):
    code, exit_code, status, retry_safe = "timeout", 22, "DEADLINE_EXCEEDED", True
    remedy = "retry; use a larger --timeout if the rank is large"


class WrongState(SnapshotError):
    """The state of the move does not allow the requested step."""

    code, exit_code, status = "wrong-state", 23, "FAILED_PRECONDITION"
    remedy = "`migrator status MOVE` shows the state of the move"


class GpuFailed(SnapshotError):
    """The CUDA driver failed or did not respond. The message contains the driver's name for the error."""

    code, exit_code, status = "gpu-failed", 24, "ABORTED"
    remedy = "look up the driver's error, and check `nvidia-smi` on that node; a retry is safe while the job runs"


class NcclFailed(SnapshotError):
    """NCCL, or the shim in front of it, failed. The message names the process and the communicator."""

    code, exit_code, status = "nccl-failed", 25, "ABORTED"
    remedy = "the job runs with its communicators as before; a retry is safe"


def _subclasses(cls: type[SnapshotError]) -> list[type[SnapshotError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]


BY_CODE: dict[str, type[SnapshotError]] = {cls.code: cls for cls in _subclasses(SnapshotError)}

#: The key of the trailing metadata that contains the wire form of an error, next to gRPC's own status.
WIRE_KEY = "snapshotd-error-bin"
_MAX_NODE_CHARS = 100


def from_wire(blob: bytes, node: str = "") -> SnapshotError:
    """The error that the daemon of `node` raised, as an instance of the same class. It is of this node, unless that says that
    it is of another one. A malformed blob becomes an Internal error."""
    try:
        fields = json.loads(blob)
        cls = BY_CODE.get(str(fields["code"]), Internal)
        error = cls(str(fields["message"]), remedy=str(fields["remedy"]), where=Where(fields["where"]))
        error.of_node = str(fields.get("of_node") or node)[:_MAX_NODE_CHARS]
    except (ValueError, KeyError, TypeError, RecursionError):
        error = Internal(f"a daemon returned a malformed error: {blob[:200]!r}")
        error.of_node = node
    return error
