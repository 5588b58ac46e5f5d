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
    LOST = "has lost its copy"  # which never ran
    DROPPED = "has dropped its copy"  # which never ran
    RUNS = "runs its copy"
    DONE = "has carried it out"  # released; or the copy has run and ended


# ---------------------------------------------------------------- a store


class StoreDecision(StrEnum):
    WAIT = "wait"
    RECORD_COMMIT = "record COMMIT"
    RECORD_ABORT = "record ABORT"
    THAW = "thaw"
    RELEASE = "release"  # end the frozen processes; the image is the rank
    CONTINUE = "continue"  # of a snapshot: the image is complete, and the rank goes on, whatever the outcome will be
    KEEP = "keep"  # of a snapshot: the image counts
    CLOSE = "close"


@dataclass(frozen=True)
class StoreFacts:
    mark: Mark
    outcome: Outcome | None
    copy_exists: bool  # the rank's frozen or running process, and its home keeper if that is here
    interrupted: bool  # the daemon was restarted inside freeze or dump
    lease_expired: bool  # the driver has been silent for long
    coordinator: Answer
    snapshot: bool = False
    continued: bool = False  # of a snapshot: the rank was let go on after the dump


def store_next(facts: StoreFacts) -> tuple[StoreDecision, str]:
    """The next action of the daemon that has the rank's process."""
    if facts.mark is Mark.SETTLED:
        return StoreDecision.CLOSE, "settled"
    if facts.outcome is Outcome.ABORT:
        return StoreDecision.THAW, "aborted: the rank goes on here"
    if facts.snapshot and facts.mark is Mark.STREAMED and not facts.continued:
        # The filters of the other ranks keep the cut consistent until their own images are complete.
        return StoreDecision.CONTINUE, "the image is complete"
    if facts.outcome is Outcome.COMMIT:
        if facts.snapshot:
            return StoreDecision.KEEP, "the snapshot is complete"
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
    """What a store tells the coordinator. Of a snapshot, it is the image that must exist, not the rank's process."""
    if outcome is Outcome.ABORT:
        return Part.DONE if mark is Mark.SETTLED else Part.LOST
    if mark is Mark.SETTLED:
        return Part.DONE
    if mark is Mark.STREAMED and (copy_exists or outcome is Outcome.COMMIT):
        return Part.READY
    return Part.LOST if mark is Mark.STREAMED else Part.WORKING


# ---------------------------------------------------------------- a buddy, which keeps a copy of a snapshot's image


class CopyDecision(StrEnum):
    WAIT = "wait"
    RECORD_COMMIT = "record COMMIT"
    RECORD_ABORT = "record ABORT"
    KEEP = "keep"
    DROP = "drop"
    CLOSE = "close"


def copy_next(mark: Mark, outcome: Outcome | None, coordinator: Answer) -> tuple[CopyDecision, str]:
    """The next action of the daemon that receives a copy of an image. SEALED: the whole image is here."""
    if mark in {Mark.SETTLED, Mark.DISCARDED}:
        return CopyDecision.CLOSE, str(mark)
    if outcome is Outcome.COMMIT:
        return CopyDecision.KEEP, "the snapshot is complete"
    if outcome is Outcome.ABORT:
        return CopyDecision.DROP, "the snapshot was given up"
    if coordinator is Answer.COMMIT and mark is Mark.SEALED:
        return CopyDecision.RECORD_COMMIT, "the coordinator has recorded COMMIT"
    if coordinator is Answer.ABORT:
        return CopyDecision.RECORD_ABORT, "the coordinator has recorded ABORT"
    if coordinator is Answer.UNKNOWN and mark is not Mark.SEALED:  # it cannot commit without this copy
        return CopyDecision.RECORD_ABORT, "the coordinator does not know of it"
    return CopyDecision.WAIT, f"the coordinator's record decides ({coordinator})"


def copy_state(mark: Mark, *, whole: bool) -> CopyState:
    """What it tells the coordinator. `whole`: the image is here; it lies in memory, and is gone after a reboot."""
    match mark:
        case Mark.SEALED if whole:
            return CopyState.STORED
        case Mark.SETTLED:
            return CopyState.KEPT
        case Mark.DISCARDED:
            return CopyState.DISCARDED
        case _:
            return CopyState.RECEIVING


# ---------------------------------------------------------------- a target


def target_part(state: CopyState) -> Part:
    """What the answer of a target or a buddy about its copy means to the coordinator."""
    match state:
        case CopyState.HELD | CopyState.STORED:
            return Part.READY
        case CopyState.RUNNING:
            return Part.RUNS
        case CopyState.ENDED | CopyState.KEPT:
            return Part.DONE
        case CopyState.DISCARDED:
            return Part.DROPPED
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
    TAKE_BACK = "take back"  # a copy died before it ran, which overrules COMMIT: the job is suspended again
    END = "end the copies"  # those that run although the resumption was taken back
    CLOSE = "close"


#: Answers after COMMIT that do not change any more, as long as COMMIT stands.
CARRIED_OUT = frozenset({Part.DONE, Part.RUNS})


class Ended(StrEnum):
    """Whether a node has ended an incarnation that is over."""

    ENDED = "has none of its processes"
    NOT_YET = "still has some"
    DAEMON_DOWN = "its daemon is down, and its ranks may run"  # its machine answers
    SILENT = "does not answer"  # nor its machine; it may be cut off
    CUT_OFF = "has been silent for so long that it has ended them itself"


#: A node that is cut off from the coordinator of a rank for this long ends that rank (jobs/tether.py). The coordinator waits
#: longer: until the node's last question was answered, asked again, and its processes have been killed.
CUT_OFF_S = 15.0
FENCED_S = CUT_OFF_S + 10.0
#: With these answers of all nodes no process of the incarnation runs.
OVER = frozenset({Ended.ENDED, Ended.CUT_OFF})


def is_cut_off(silent_s: float) -> bool:
    return silent_s >= CUT_OFF_S


def silent_node(silent_s: float) -> Ended:
    """What the coordinator may conclude about a node that it has asked in vain for so long."""
    return Ended.CUT_OFF if silent_s >= FENCED_S else Ended.SILENT


# ---------------------------------------------------------------- the coordinator's lease (jobs/lease.py)

#: With fewer nodes no majority is left when one of them is lost: only an operator can decide then, so no lease is needed.
MIN_VOTERS = 3


class Former(StrEnum):
    """What a node finds that is asked to follow another coordinator than the one that has its promise."""

    SILENT = "does not answer"  # nor its machine
    THERE = "is there"  # it, or at least its machine
    LEFT = "has handed the job over"
    UNKNOWN = "answers that it does not coordinate the job"  # it asked for the promise, and did not get enough of them


def holds_lease(
    quorums: Collection[Collection[str]], promised_s: Mapping[str, float], now_s: float, lost: Collection[str] = ()
) -> bool:
    """Whether a coordinator may let ranks run. `promised_s`: when it last asked each node that then promised to follow it. It
    counts from the question, because the node counts from its answer, which is later."""
    asked = [voters for voters in quorums if len(voters) >= MIN_VOTERS]
    recent = {node for node, since_s in promised_s.items() if now_s - since_s < CUT_OFF_S} | set(lost)
    return all(is_majority(voters, recent) for voters in asked)


def is_majority(voters: Collection[str], found: Collection[str]) -> bool:
    return 2 * len(set(voters) & set(found)) > len(set(voters))


def may_promise(
    former: Former, answered_ago_s: float, *, promised_before: bool, declared: bool = False
) -> tuple[bool, str]:
    """Whether a node may follow another coordinator than `former`, to which it answered last so long ago. `promised_before`:
    the former one got the promise in place of another one. `declared`: an operator has declared the former one dead."""
    if former is Former.LEFT:
        return True, "it has handed the job over"
    if former is Former.THERE or (former is Former.UNKNOWN and not promised_before):
        return False, f"it {former}"
    if declared and former is Former.SILENT:
        return True, "an operator has declared it dead"
    if answered_ago_s < FENCED_S:
        return False, f"it was heard {answered_ago_s:.0f} s ago; after {FENCED_S:.0f} s of silence its ranks have ended"
    return True, f"it {former}, since {answered_ago_s:.0f} s"


def may_take_over(
    quorums: Collection[Collection[str]], promised: Collection[str], lost: Collection[str], *, handed_over: bool
) -> tuple[bool, str]:
    """Whether a node may coordinate a job in place of another one. `promised`: the nodes that follow it. `lost`: those that
    an operator has declared dead."""
    for voters in quorums:
        if len(voters) < MIN_VOTERS and not handed_over and not lost:
            return False, (
                f"only {' and '.join(sorted(voters))} keep its snapshot: without one of them there is no majority, so"
                " an operator must decide"
            )
        if len(voters) >= MIN_VOTERS and not is_majority(voters, {*promised, *lost}):
            missing = sorted(set(voters) - set(promised) - set(lost))
            return False, f"no majority of {', '.join(sorted(voters))} agrees: {', '.join(missing)} do not"
    return bool(quorums) or handed_over or bool(lost), "no node knows how many must agree"


# ---------------------------------------------------------------- ending an incarnation


def may_not_end(bound_to: str, coordinator: str) -> str:
    """Why a copy of an incarnation that this coordinator has ended must not be ended in its word; empty: it may be. As long
    as there is such a copy, its node has not ended the incarnation."""
    if bound_to == coordinator:
        return ""
    return f"its coordinator is {bound_to}" if bound_to else "it has no coordinator: no snapshot of it is complete here"


def unbound(parts: Mapping[str, Part], lost_nodes: Collection[str]) -> list[str]:
    """The nodes that may have ranks which are not bound to the coordinator of a snapshot yet: the job must not be rolled back
    to it, because these ranks would go on. `parts`: the answer of each node with ranks, the worst one."""
    return [node for node, part in parts.items() if part is not Part.DONE and node not in lost_nodes]


def rollback_next(answers: Mapping[str, Ended]) -> tuple[JobDecision, str]:
    """The coordinator's next action. `answers`: of all nodes, except those that an operator has declared dead."""
    if all(answer in OVER for answer in answers.values()):
        return JobDecision.CLOSE, "no process of the incarnation runs anywhere"
    return JobDecision.ASK, "the incarnation that was rolled back has not ended on all nodes yet"


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
    resumes: bool = False,
) -> tuple[JobDecision, str]:
    """The coordinator's next action. `parts`: the participants' last answers; empty: they were not asked yet. `given_up`: an
    operator has dropped the images, so it does not matter any more whether all nodes have carried out COMMIT. `resumes`: the
    record is of a resumption."""
    if mark is Mark.SETTLED:
        return JobDecision.CLOSE, "settled"
    if outcome is None:
        if lease_expired:
            return JobDecision.RECORD_ABORT, "the driver was silent for longer than its lease"
        return JobDecision.WAIT, "the driver decides"
    over: Collection[Part] = CARRIED_OUT
    if outcome is Outcome.COMMIT:
        if given_up:
            return JobDecision.CLOSE, "the job is given up"
        if resumes and any(part in {Part.LOST, Part.DROPPED} for part in parts):
            # Its target journals ACTIVATED before the first instruction runs, so this copy never ran and never will.
            return JobDecision.TAKE_BACK, "committed, but a copy died before it ever ran: the job is suspended again"
    elif Part.RUNS in parts:
        return JobDecision.END, "taken back, and copies that were let run before that run still"
    else:
        over = {Part.DONE, Part.DROPPED, Part.ABSENT}
    if parts and all(part in over for part in parts):
        return JobDecision.CLOSE, "all nodes have carried it out"
    return JobDecision.ASK, f"{outcome} is recorded, and not carried out by all nodes yet"
