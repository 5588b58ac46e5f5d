"""A job that the autopilot has suspended, or is about to, so that a rank of a higher priority fits. A plain value.

Invariant: it is recorded as SUSPENDING before a daemon is asked to suspend, and as RESUMING before one is asked to resume.
Both name the record that the coordinator of the job will keep, so after a restart the daemons say what became of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from migrator.autopilot.model import Gpu, Move, MoveState, Rank


class SuspensionState(StrEnum):
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    RESUMED = "resumed"
    NOT_SUSPENDED = "not suspended"  # it was refused or undone: the job runs, as before
    NEVER_BEGAN = "never began"  # the autopilot ended between its intent and the first step
    OVER = "over"  # others have resumed the job, or dropped its images


#: The job is suspended, or may be.
OPEN = frozenset({SuspensionState.SUSPENDING, SuspensionState.SUSPENDED, SuspensionState.RESUMING})
#: Daemons are at work.
BUSY = frozenset({SuspensionState.SUSPENDING, SuspensionState.RESUMING})


@dataclass(frozen=True)
class SuspendedRank:
    uid: str
    rank: int
    node: str  # that has its image
    home: str  # where its launcher started it
    gpus: tuple[Gpu, ...]  # that it used
    memory_bytes: int  # on the host, with its device memory
    target: str = ""  # where it is resumed


@dataclass(frozen=True)
class Suspension:
    id: str  # also that of the coordinator's record
    job: str
    user_id: int
    ranks: tuple[SuspendedRank, ...]
    node: str  # where a place is freed
    makes_room_for: str  # uid of the rank that takes the place
    reason: str  # in words, with both priorities
    intended_unix_s: float
    state: SuspensionState = SuspensionState.SUSPENDING
    order: int = 0  # the operator's order that the rank follows; 0: a rule's
    suspended_unix_s: float = 0.0
    resumption: str = ""  # id of the record of the last attempt to resume it
    failures: int = 0  # attempts to resume it
    failed_unix_s: float = 0.0  # the last one
    ended_unix_s: float = 0.0
    result: str = ""  # why it was not suspended, or not resumed

    @property
    def job_key(self) -> str:
        return f"{self.user_id}/{self.job}"

    @property
    def open(self) -> bool:
        return self.state in OPEN

    @property
    def counts(self) -> bool:
        """Whether it counts for the limits of moves. Those that failed have a limit of their own."""
        return self.state not in (SuspensionState.NOT_SUSPENDED, SuspensionState.NEVER_BEGAN)

    @property
    def nodes(self) -> frozenset[str]:
        """Those that have its ranks, or their images. One of them coordinates."""
        return frozenset(rank.node for rank in self.ranks)

    def as_ranks(self) -> list[Rank]:
        """What the policy is asked about."""
        return [Rank(one.uid, self.job, one.rank, self.user_id, one.node) for one in self.ranks]

    def moves(self) -> list[Move]:
        """What its ranks free, and what they will take, as moves from nowhere and to nowhere."""
        if not self.open and self.state is not SuspensionState.RESUMED:
            return []
        busy, found = self.state in BUSY, []
        coming = self.state in (SuspensionState.RESUMING, SuspensionState.RESUMED)
        for one in self.ranks:
            if self.open:
                left = MoveState.INTENDED if self.state is SuspensionState.SUSPENDING else MoveState.MOVED
                room = self.makes_room_for if one.node == self.node else ""
                found.append(self._move(one, self.id, one.node, "", left, self.suspended_unix_s, room))
            if coming:
                state = MoveState.INTENDED if busy else MoveState.MOVED
                found.append(self._move(one, self.resumption, "", one.target, state, self.ended_unix_s))
        return found

    def _move(
        self,
        one: SuspendedRank,
        move: str,
        source: str,
        target: str,
        state: MoveState,
        ended_unix_s: float,
        room: str = "",
    ) -> Move:
        return Move(
            id=move,
            rank_uid=one.uid,
            job_key=self.job_key,
            rank=one.rank,
            source=source,
            target=target,
            state=state,
            cause=self.reason,
            reason=self.reason,
            intended_unix_s=self.intended_unix_s,
            ended_unix_s=ended_unix_s,
            gpus=len(one.gpus),
            memory_bytes=one.memory_bytes,
            makes_room_for=room,
        )
