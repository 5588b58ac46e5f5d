"""Decides what daemons do next about the suspension or resumption of a job: pure functions from facts to (decision, reason).

`migrator/job_protocol.py` explains the protocol. A target's rules are those of any move (`rules.target_next`), except that it
asks the coordinator instead of a source.

Invariant: the coordinator records COMMIT only if every participant has answered READY, and a participant that has answered
READY changes that only with the coordinator's outcome. So ABORT never leaves a rank without a process, and COMMIT never one
without an image.

No I/O here. `tests/protocol/test_jobs.py` walks every prefix with every participant failing, over these same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from snapshotd.moves.rules import CopyState, Mark, Outcome


class Answer(StrEnum):
    """The coordinator's answer to a participant. UNREACHABLE is the absence of an answer."""

    UNREACHABLE = "unreachable"
    UNKNOWN = "no such record"
    UNDECIDED = "undecided"
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class Part(StrEnum):
    """A participant's answer to the coordinator. UNREACHABLE is the absence of an answer."""

    UNREACHABLE = "does not answer"
    ABSENT = "does not know of it"
    WORKING = "is not ready"
    READY = "is ready"  # a whole image is stored, or a whole copy is held
    LOST = "has lost its copy"
    DONE = "has carried it out"  # released, or activated


# ---------------------------------------------------------------- a store


class StoreDecision(StrEnum):
    WAIT = "wait"
    RECORD_COMMIT = "record COMMIT"
    RECORD_ABORT = "record ABORT"
    THAW = "thaw"
    RELEASE = "release"  # end the frozen processes; the image is the rank
    CLOSE = "close"


@dataclass(frozen=True)
class StoreFacts:
    mark: Mark
    outcome: Outcome | None
    copy_exists: bool  # the rank's frozen or running process, and its home keeper if that is here
    interrupted: bool  # the daemon was restarted inside freeze or dump
    lease_expired: bool  # the driver has been silent for long
    coordinator: Answer


def store_next(facts: StoreFacts) -> tuple[StoreDecision, str]:
    """The next action of the daemon that has the rank's process."""
    if facts.mark is Mark.SETTLED:
        return StoreDecision.CLOSE, "settled"
    if facts.outcome is Outcome.ABORT:
        return StoreDecision.THAW, "aborted: the rank goes on here"
    if facts.outcome is Outcome.COMMIT:
        return StoreDecision.RELEASE, "the job is suspended"
    if facts.coordinator is Answer.ABORT:
        return StoreDecision.RECORD_ABORT, "the coordinator has recorded ABORT"
    if facts.mark is Mark.STREAMED:
        if facts.coordinator is Answer.COMMIT:
            return StoreDecision.RECORD_COMMIT, "the coordinator has recorded COMMIT"
        return StoreDecision.WAIT, f"a whole image is stored; the coordinator's record decides ({facts.coordinator})"
    # Without a whole image here the coordinator cannot commit: this daemon may decide alone.
    if facts.interrupted:
        return StoreDecision.RECORD_ABORT, "the daemon was restarted in the middle of this step"
    if not facts.copy_exists:
        return StoreDecision.RECORD_ABORT, "the rank has ended"
    if facts.coordinator is Answer.UNKNOWN:
        return StoreDecision.RECORD_ABORT, "the coordinator does not know of it"
    if facts.lease_expired and facts.coordinator is Answer.UNREACHABLE:
        return StoreDecision.RECORD_ABORT, "driver and coordinator are silent"
    return StoreDecision.WAIT, "the driver decides"


def store_answer(mark: Mark, outcome: Outcome | None, *, copy_exists: bool) -> Part:
    """What a store tells the coordinator."""
    if outcome is Outcome.ABORT:
        return Part.DONE if mark is Mark.SETTLED else Part.LOST
    if mark is Mark.SETTLED:
        return Part.DONE
    if mark is Mark.STREAMED and (copy_exists or outcome is Outcome.COMMIT):
        return Part.READY
    return Part.LOST if mark is Mark.STREAMED else Part.WORKING


def target_part(state: CopyState) -> Part:
    """What a target's answer about its copy means to the coordinator of a resumption."""
    match state:
        case CopyState.HELD:
            return Part.READY
        case CopyState.RUNNING | CopyState.ENDED | CopyState.DISCARDED:
            return Part.DONE
        case CopyState.GONE:
            return Part.LOST
        case CopyState.NO_SUCH_MOVE:
            return Part.ABSENT
        case CopyState.UNREACHABLE:
            return Part.UNREACHABLE
        case _:
            return Part.WORKING


# ---------------------------------------------------------------- the coordinator


class JobDecision(StrEnum):
    WAIT = "wait"  # for the driver
    RECORD_ABORT = "record ABORT"
    ASK = "ask the participants"
    CLOSE = "close"


#: Answers after COMMIT that do not change any more.
CARRIED_OUT = frozenset({Part.DONE})


def may_commit(parts: Mapping[str, Part]) -> tuple[bool, str]:
    """Whether COMMIT may be recorded, and if not, which participants are not ready. Keys name them for display."""
    unready = [f"{name} {part}" for name, part in parts.items() if part is not Part.READY]
    return not unready and bool(parts), "; ".join(unready) or "there is no participant"


def job_next(
    mark: Mark,
    outcome: Outcome | None,
    parts: Collection[Part],
    *,
    lease_expired: bool,
    given_up: bool = False,
) -> tuple[JobDecision, str]:
    """The coordinator's next action. `parts`: the participants' last answers; empty: they were not asked yet. `given_up`: an
    operator has dropped the images, so it does not matter any more whether all nodes have carried out COMMIT."""
    if mark is Mark.SETTLED:
        return JobDecision.CLOSE, "settled"
    if outcome is None:
        if lease_expired:
            return JobDecision.RECORD_ABORT, "the driver was silent for longer than its lease"
        return JobDecision.WAIT, "the driver decides"
    if given_up and outcome is Outcome.COMMIT:
        return JobDecision.CLOSE, "the job is given up"
    over = CARRIED_OUT if outcome is Outcome.COMMIT else {Part.DONE, Part.ABSENT}
    if parts and all(part in over for part in parts):
        return JobDecision.CLOSE, "all nodes have carried it out"
    return JobDecision.ASK, f"{outcome} is recorded, and not carried out by all nodes yet"
