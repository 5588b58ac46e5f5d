"""Which caller may call which method, and the form in which errors are returned to the caller.

Invariant: no servicer runs for a caller whose role the table below does not list, and a method that is not in the table
cannot be called at all. The network process checks this for the certificate that the caller shows (network/inbound.py);
the daemon checks it again for the role that the network process states (network/dispatch.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapshotd.api.calls import CallFailed
from snapshotd.api.errors import Denied, SnapshotError

Role = Literal["operator", "node", "root"]

_OPERATOR: frozenset[Role] = frozenset({"operator", "root"})
_NODE: frozenset[Role] = frozenset({"node", "root"})
_BOTH: frozenset[Role] = _OPERATOR | _NODE

#: The same as in the comments of proto/snapshotd.proto; tests/api/test_access.py compares the two.
ALLOWED: dict[str, frozenset[Role]] = {
    "/snapshotd.v1.Node/GetNode": _BOTH,
    "/snapshotd.v1.Node/ListRanks": _BOTH,
    "/snapshotd.v1.Node/ListMoves": _BOTH,
    "/snapshotd.v1.Node/FindNode": _OPERATOR,
    "/snapshotd.v1.Node/Diagnose": _OPERATOR,
    "/snapshotd.v1.Node/OpenProbe": _NODE,
    "/snapshotd.v1.Node/GetHealth": _BOTH,
    "/snapshotd.v1.Node/ClearAlarms": _OPERATOR,
    "/snapshotd.v1.Node/GetProgress": _OPERATOR,
    "/snapshotd.v1.Node/GetSpans": _OPERATOR,
    "/snapshotd.v1.Source/Inspect": _OPERATOR,
    "/snapshotd.v1.Source/Begin": _OPERATOR,
    "/snapshotd.v1.Source/PrepareDevice": _OPERATOR,
    "/snapshotd.v1.Source/Detach": _OPERATOR,
    "/snapshotd.v1.Source/Freeze": _OPERATOR,
    "/snapshotd.v1.Source/Stream": _OPERATOR,
    "/snapshotd.v1.Source/Attach": _OPERATOR,
    "/snapshotd.v1.Source/Renew": _OPERATOR,
    "/snapshotd.v1.Source/Commit": _OPERATOR,
    "/snapshotd.v1.Source/Abort": _OPERATOR,
    "/snapshotd.v1.Source/Release": _OPERATOR,
    "/snapshotd.v1.Source/GetOutcome": _BOTH,
    "/snapshotd.v1.Source/DeclareTargetDead": _OPERATOR,
    "/snapshotd.v1.Source/DeclareMemberDead": _OPERATOR,
    "/snapshotd.v1.Source/GetImage": _OPERATOR,
    "/snapshotd.v1.Source/Send": _OPERATOR,
    "/snapshotd.v1.Source/DropImage": _BOTH,
    "/snapshotd.v1.Source/Hurry": _OPERATOR,
    "/snapshotd.v1.Target/Examine": _OPERATOR,
    "/snapshotd.v1.Target/Prepare": _OPERATOR,
    "/snapshotd.v1.Target/Push": _NODE,
    "/snapshotd.v1.Target/OpenImageChannel": _NODE,
    "/snapshotd.v1.Target/OpenDeviceChannel": _NODE,
    "/snapshotd.v1.Target/AllocateDeviceMemory": _NODE,
    "/snapshotd.v1.Target/Seal": _NODE,
    "/snapshotd.v1.Target/Restore": _OPERATOR,
    "/snapshotd.v1.Target/Activate": _BOTH,
    "/snapshotd.v1.Target/Discard": _BOTH,
    "/snapshotd.v1.Target/GetCopy": _BOTH,
    "/snapshotd.v1.Target/DeclareSourceDead": _OPERATOR,
    "/snapshotd.v1.Peer/InspectConnections": _OPERATOR,
    "/snapshotd.v1.Peer/SuspendTimeouts": _OPERATOR,
    "/snapshotd.v1.Peer/Hold": _OPERATOR,
    "/snapshotd.v1.Peer/Repoint": _OPERATOR,
    "/snapshotd.v1.Peer/Settle": _BOTH,
    "/snapshotd.v1.Peer/Forward": _NODE,
    "/snapshotd.v1.Peer/ConfirmDeparture": _NODE,
    "/snapshotd.v1.Gate/Close": _OPERATOR,
    "/snapshotd.v1.Gate/Report": _BOTH,
    "/snapshotd.v1.Gate/SetTargets": _OPERATOR,
    "/snapshotd.v1.Gate/Detach": _NODE,
    "/snapshotd.v1.Gate/NewId": _NODE,
    "/snapshotd.v1.Gate/Attach": _NODE,
    "/snapshotd.v1.Gate/GiveUp": _NODE,
    "/snapshotd.v1.Gate/Open": _BOTH,
    "/snapshotd.v1.Home/Relay": _NODE,
    "/snapshotd.v1.Home/Say": _NODE,
    "/snapshotd.v1.Job/Begin": _OPERATOR,
    "/snapshotd.v1.Job/Renew": _OPERATOR,
    "/snapshotd.v1.Job/Detach": _OPERATOR,
    "/snapshotd.v1.Job/Attach": _OPERATOR,
    "/snapshotd.v1.Job/Commit": _OPERATOR,
    "/snapshotd.v1.Job/Abort": _OPERATOR,
    "/snapshotd.v1.Job/GetOutcome": _BOTH,
    "/snapshotd.v1.Job/Drop": _OPERATOR,
    "/snapshotd.v1.Job/List": _OPERATOR,
    "/snapshotd.v1.Job/Rollback": _OPERATOR,
    "/snapshotd.v1.Job/MayRun": _NODE,
    "/snapshotd.v1.Job/EndRanks": _NODE,
    "/snapshotd.v1.Job/ListKept": _OPERATOR,
    "/snapshotd.v1.Job/HandOver": _OPERATOR,
    "/snapshotd.v1.Job/Adopt": _OPERATOR,
    "/snapshotd.v1.Job/Succeed": _OPERATOR,
    "/snapshotd.v1.Job/Lease": _NODE,
}

#: Of a longer message only the beginning and the end are sent: it must fit twice into the limits of api/channel.py.
_MAX_MESSAGE_CHARS = 8_000
_MAX_DETAILS_CHARS = 500


@dataclass(frozen=True)
class Caller:
    """The peer of a call."""

    role: Role
    name: str

    def __str__(self) -> str:
        return self.role if self.role == "root" else f"{self.role} {self.name}"


def check(method: str, found: Caller) -> None:
    """Raises Denied if the table does not allow the caller to call `method`."""
    roles = ALLOWED.get(method, frozenset())
    if found.role not in roles:
        allowed = " or ".join(f"an {role}" if role == "operator" else f"a {role}" for role in sorted(roles - {"root"}))
        reason = f"only {allowed} may" if allowed else "it is not in the access table"
        raise Denied(f"{found} may not call {method.rpartition('/')[2]}: {reason}")


def failure(error: SnapshotError) -> CallFailed:
    """How a call ends that failed with `error`: with its status, its message, and its wire form."""
    message = error.message
    if len(message) > _MAX_MESSAGE_CHARS:
        half = _MAX_MESSAGE_CHARS // 2
        message = f"{message[:half]}\n[… {len(message) - 2 * half} characters left out …]\n{message[-half:]}"
    short = type(error)(message, remedy=error.advice[:_MAX_DETAILS_CHARS], where=error.where)
    short.of_node = error.of_node
    return CallFailed(error.status, message[:_MAX_DETAILS_CHARS], short.to_wire())
