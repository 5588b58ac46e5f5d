"""What the autopilot knows about a cluster: nodes, alarms, ranks and moves, as plain values without I/O.

Invariant: a value here was reported by a daemon or recorded by an operator. Nothing is assumed about a node that has not
answered: `Node.seen` is False until its first answer, and such a node is never a target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Severity(IntEnum):
    """As the daemons report it."""

    NOTICE = 1
    WARNING = 2
    CRITICAL = 3


class Action(StrEnum):
    """What a rule asks for, from the weakest to the strongest."""

    OBSERVE = "observe"  # record it
    TAINT = "taint"  # no rank is moved to the node any more
    MOVE = "move"  # taint, and move the ranks that the alarm concerns
    DRAIN = "drain"  # taint, and move every rank of the node


class NodeState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # an alarm that no rule acts on, or the daemon does not answer: no rank is moved there
    TAINTED = "tainted"  # by a rule or an operator, until an operator ends it
    DRAINING = "draining"  # its ranks are being moved away
    DRAINED = "drained"  # no rank is left
    REPAIRING = "repairing"  # drained, and then silent: it is being worked on
    VALIDATING = "validating"  # `migrator return` examines it
    RETURNED = "returned"  # passed the validation; healthy after a probation without alarms


#: States of a node that has been taken out of use.
OUT = frozenset({NodeState.TAINTED, NodeState.DRAINING, NodeState.DRAINED, NodeState.REPAIRING, NodeState.VALIDATING})


@dataclass(frozen=True)
class Loss:
    """What a job loses by one rank that the others wait for."""

    job_key: str
    share: float  # of the job's time
    lost_s: float  # since the alarm was raised
    usual_per_s: float  # collectives of the job in a second, before
    now_per_s: float
    others: int  # ranks that wait
    confirmed: bool  # by the node of the rank, or by two others


@dataclass(frozen=True)
class Alarm:
    node: str
    check: str
    subject: str  # gpu:UUID, link:INTERFACE, host, disk:NAME or rank:UID
    severity: Severity
    text: str
    since_unix_s: float
    last_unix_s: float = 0.0
    count: int = 1
    remedy: str = ""
    loss: Loss | None = None  # of alarms about stragglers, which the autopilot itself raises


@dataclass(frozen=True)
class CommunicatorProgress:
    """Collectives of one member of a communicator, by number of the reading."""

    id: int
    nranks: int
    member: int
    numbers: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]


@dataclass(frozen=True)
class RankProgress:
    uid: str
    measure: str  # nccl, tcp or cpu; empty: nothing is known yet
    unchanged_s: float
    usual_s: float
    communicators: tuple[CommunicatorProgress, ...] = ()


@dataclass(frozen=True)
class NodeProgress:
    """How far the ranks of a node have come, as its daemon says."""

    node: str
    period_ms: int
    ahead_s: float  # its clock against that of the autopilot
    unsure_s: float
    ranks: tuple[RankProgress, ...] = ()

    @property
    def newest(self) -> int:
        """The number of the last reading; 0: there is none."""
        found = (comm.numbers[-1] for rank in self.ranks for comm in rank.communicators if comm.numbers)
        return max(found, default=0)


@dataclass(frozen=True)
class HealthEvent:
    """What happened on a node, once for each (epoch, sequence)."""

    sequence: int
    unix_s: float
    kind: str  # raised, repeated or cleared
    check: str
    subject: str
    severity: Severity
    text: str
    value: float = 0.0


@dataclass(frozen=True)
class HealthReport:
    """One answer of a node's daemon: all its alarms, and the events since the last answer."""

    node: str
    epoch: str
    sequence: int
    alarms: tuple[Alarm, ...] = ()
    events: tuple[HealthEvent, ...] = ()
    more: bool = False
    pruned: bool = False  # events were dropped by the node before they could be read


@dataclass(frozen=True)
class Gpu:
    uuid: str
    model: str
    memory_bytes: int
    free: bool  # no process uses it, no move has reserved it, and it is not partitioned


@dataclass(frozen=True)
class Rank:
    uid: str
    job: str
    rank: int
    user_id: int
    node: str  # where its process is
    gpus: tuple[str, ...] = ()  # UUIDs
    memory_bytes: int = 0
    device_bytes: int = 0
    moving: str = ""  # id of the move in progress
    home: str = ""  # where its launcher started it

    @property
    def job_key(self) -> str:
        """A job is named by its user and its name."""
        return f"{self.user_id}/{self.job}"

    @property
    def size_bytes(self) -> int:
        """On the host and on its GPUs. A suspended rank needs as much host memory."""
        return self.memory_bytes + self.device_bytes


@dataclass(frozen=True)
class Node:
    name: str
    state: NodeState = NodeState.HEALTHY
    reason: str = ""  # for the state
    since_unix_s: float = 0.0
    seen: bool = True  # it has answered since the autopilot started
    reachable: bool = True
    asked_unix_s: float = math.inf  # when it was asked for what is known of it
    labels: Mapping[str, str] = field(default_factory=dict)  # spare, rack, network
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    memory_free_bytes: int = 0
    device_window_bytes: int = (
        0  # host memory for a rank's device memory during a move, at most; 0: as much as it is large
    )
    maintenance: str = ""  # until when its maintenance lasts, which has begun or begins soon; empty: there is none

    @property
    def dedicated(self) -> bool:
        return self.labels.get("spare") == "dedicated"


class MoveState(StrEnum):
    """How far an intended move has come. It is recorded as INTENDED before a daemon is asked for anything."""

    INTENDED = "intended"
    MOVED = "moved"
    UNDONE = "undone"
    REFUSED = "refused"  # by preflight, before anything was paused
    NEVER_BEGAN = "never began"  # the autopilot ended between its intent and the first step
    LOST = "lost"  # the rank has ended, or its outcome can no longer be found out


#: The move has ended, and the rank is where it was.
FAILED = frozenset({MoveState.UNDONE, MoveState.REFUSED})


@dataclass(frozen=True)
class Move:
    """One move that the autopilot or an operator's order intended."""

    id: str  # also the id that the daemons journal
    rank_uid: str
    job_key: str
    rank: int
    source: str
    target: str
    state: MoveState
    cause: str  # a rule, or the order of an operator
    reason: str  # the decision in words
    intended_unix_s: float
    ended_unix_s: float = 0.0
    pause_s: float = 0.0
    result: str = ""
    order: int = 0  # id of the operator's order; 0: a rule's
    gpus: int = 0
    memory_bytes: int = 0
    detected_unix_s: float = 0.0  # when the alarm was raised, or the order given
    cause_class: str = "unknown"  # see cause_class()
    job_gpus: int = 0  # of all ranks of the job, which wait while this one moves
    makes_room_for: str = ""  # uid of the rank that takes its place


@dataclass(frozen=True)
class Order:
    """What an operator asked for: `migrator drain`, `evacuate`, `return`, `rebalance`, or on the page to move one rank."""

    id: int
    kind: str  # drain, evacuate, return, rebalance or move
    node: str  # of "move": where the rank was; of "rebalance": empty, all are meant
    targets: tuple[str, ...] = ()
    reason: str = ""
    by: str = ""
    since_unix_s: float = 0.0
    ended_unix_s: float = 0.0  # 0: open
    summary: str = ""  # how it ended
    rank_uid: str = ""  # of "move"
    rank_name: str = ""  # in words, for the record
    before: str = ""  # the state of its node when it was given
    used_again: bool = False  # of the last one about a node: an operator has put the node back into use since

    @property
    def empties(self) -> bool:
        """Whether all ranks must leave the node."""
        return self.kind in ("drain", "evacuate")

    @property
    def subject(self) -> str:
        return f"{self.rank_name} on {self.node}" if self.kind == "move" else self.node or "the cluster"

    @property
    def brings_back(self) -> bool:
        """Whether ranks are moved to the nodes where they were started, and may as well stay where they are."""
        return self.kind in ("return", "rebalance")


class ProposalState(StrEnum):
    OPEN = "open"  # it waits for an operator's answer
    APPROVED = "approved"
    REJECTED = "rejected"
    LAPSED = "lapsed"  # its cause had gone before an operator answered


@dataclass(frozen=True)
class Proposal:
    """Something that the autopilot does only if an operator approves. An answer holds as long as the cause is there."""

    id: int
    key: str  # names the action and its cause: the same is proposed once
    what: str  # what would be done
    why: str
    node: str = ""
    state: ProposalState = ProposalState.OPEN
    since_unix_s: float = 0.0
    by: str = ""  # who answered
    reason: str = ""  # that was given with the answer
    answered_unix_s: float = 0.0
    ended_unix_s: float = 0.0  # when its cause had gone; 0: it is still there

    @property
    def waits(self) -> str:
        """Why nothing is done yet. Empty: it is approved."""
        match self.state:
            case ProposalState.APPROVED:
                return ""
            case ProposalState.REJECTED:
                return f"{self.by} rejected it" + (f": {self.reason}" if self.reason else "")
        return "an operator must approve it" + (f": `migrator approve {self.id}`" if self.id else "")


def cause_class(check: str, subject: str) -> str:
    """The class of an interruption in the report: hardware, network, software, planned or unknown."""
    if subject == "operator":
        return "planned"
    kind = subject.partition(":")[0]
    if check in ("daemon-unreachable", "job-straggler") or (check.startswith("webhook-") and kind == "host"):
        return "unknown"
    return {"gpu": "hardware", "disk": "hardware", "host": "hardware", "link": "network", "rank": "software"}.get(
        kind, "unknown"
    )
