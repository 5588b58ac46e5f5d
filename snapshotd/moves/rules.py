"""Decides what a daemon does next about an unfinished move: pure functions from facts to (decision, reason).

Invariant (one copy): the source's copy may run only if the outcome is ABORT or nothing was begun, the target's only if
the outcome is COMMIT. The outcome is written once, in the source's journal. Only two things overrule it, and both are
recorded beside it: an operator's declaration, and the target's report that its copy died before it ever ran. A target that
does not know the outcome asks and waits, without a limit: waiting is always safe, guessing never is.

No I/O here. The settle loops of `snapshotd/moves/` gather the facts and carry the decisions out. `tests/protocol/` walks
every prefix of a move with every participant failing, over these same functions.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """How far a daemon has come with a move. Journalled after the fact, except ACTIVATED, which is journalled before."""

    # source
    BEGUN = "begun"  # journalled; the keeper withholds signals and stdin; the rank still runs
    FREEZING = "freezing"  # about to stop the tree
    FROZEN = "frozen"  # stopped and frozen
    STREAMED = "streamed"  # the image is complete and verified on the target
    SETTLED = "settled"  # outcome carried out: thawed, or released
    # target
    PREPARED = "prepared"  # memory reserved, nonce issued
    SEALED = "sealed"  # image complete and verified
    RESTORING = "restoring"  # criu restore has been started
    HELD = "held"  # restored, stopped
    ACTIVATED = "activated"  # allowed to run; journalled before the first SIGCONT
    DISCARDED = "discarded"
    # peer
    TIMEOUTS_SUSPENDED = "timeouts-suspended"  # of the sockets here: a long silence does not end their connections
    FILTERED = "filtered"  # the sockets here are known, and their packets dropped or about to be
    REPOINTING = "re-pointing"  # the sockets here are known and about to be changed
    REPOINTED = "re-pointed"  # all of them name the target, filtered until the outcome is known
    POINTED_BACK = "pointed back"  # all of them name the source again, still filtered
    # gate
    GATED = "gated"  # the gates here are closed or about to be closed

    @classmethod
    def _missing_(cls, value: object) -> Mark | None:
        """The name that journals of version 0.1 have."""
        return cls.TIMEOUTS_SUSPENDED if value == "braced" else None


class Outcome(StrEnum):
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class CopyState(StrEnum):
    """The target's answer about its copy. UNREACHABLE is the absence of an answer, never a state."""

    UNREACHABLE = "unreachable"
    NO_SUCH_MOVE = "no such move"
    RECEIVING = "receiving"
    HELD = "held"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"
    DISCARDED = "discarded"
    STORED = "stored"  # a copy of an image, which is kept and not restored: see job_rules.py
    KEPT = "kept"


class SourceDecision(StrEnum):
    WAIT = "wait"  # for the driver
    ASK_TARGET = "ask the target"
    RECORD_COMMIT = "record COMMIT"
    RECORD_ABORT = "record ABORT"
    THAW = "thaw"
    HAND_TOKEN = "hand the token to the target"
    RELEASE = "release"  # drop the frozen copy
    TAKE_BACK = "take back"  # the target's copy died before it ran, which overrules COMMIT: the copy here continues
    CLOSE = "close"  # nothing is left to do
    WAIT_FOR_PERSON = "wait for a person"


@dataclass(frozen=True)
class SourceFacts:
    mark: Mark
    outcome: Outcome | None
    copy_exists: bool  # same boot, and the process still exists
    lease_expired: bool
    interrupted: bool  # the daemon restarted inside freeze or stream: the step cannot be resumed
    target: CopyState = CopyState.UNREACHABLE
    restarted: bool = False  # the daemon was not there for a while since STREAMED: it may have been declared dead
    peers_deny: bool = (
        True  # asked after a restart if the target knows no such move: no node knows that the rank ran there
    )


def source_next(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source daemon's next action for one move, and the reason as text."""
    if facts.mark is Mark.SETTLED:
        return SourceDecision.CLOSE, "settled"
    if facts.outcome is Outcome.ABORT:
        if facts.copy_exists:
            return SourceDecision.THAW, "aborted: the rank goes on here"
        return SourceDecision.CLOSE, "aborted, and the rank no longer exists here"
    if facts.outcome is Outcome.COMMIT:
        match facts.target:
            case CopyState.RUNNING | CopyState.ENDED:
                return SourceDecision.RELEASE, "the target reports the rank running"
            case CopyState.HELD:
                return SourceDecision.HAND_TOKEN, "committed, and the target still holds its copy"
            case CopyState.UNREACHABLE:
                return SourceDecision.ASK_TARGET, "committed, the target does not answer"
            case CopyState.GONE | CopyState.DISCARDED:
                # The target journals ACTIVATED before the first instruction runs, so this copy never ran and never will.
                return SourceDecision.TAKE_BACK, "committed, but the target's copy died before it ever ran"
            case _:
                return SourceDecision.WAIT_FOR_PERSON, f"committed, but the target's copy is {facts.target}"
    if not facts.copy_exists:
        match facts.target:
            case CopyState.HELD if not facts.lease_expired:
                # The driver is about to have the peers re-pointed; an earlier COMMIT would lose the connections.
                return SourceDecision.ASK_TARGET, "the source's copy is gone; the driver commits the target's"
            case CopyState.HELD | CopyState.RUNNING | CopyState.ENDED:
                return SourceDecision.RECORD_COMMIT, "the source's copy is gone and the target has a whole one"
            case CopyState.UNREACHABLE if facts.mark is Mark.STREAMED:
                return SourceDecision.ASK_TARGET, "the source's copy is gone; only the target knows whether it has one"
            case CopyState.RECEIVING if facts.mark is Mark.STREAMED and not facts.lease_expired:
                return SourceDecision.ASK_TARGET, "the source's copy is gone; the target may be restoring one"
            case _:
                return SourceDecision.RECORD_ABORT, "the source's copy is gone and the target has none"
    if facts.interrupted:
        return SourceDecision.RECORD_ABORT, "the daemon was restarted in the middle of this step"
    if facts.lease_expired and facts.mark is Mark.STREAMED:
        if facts.target in {CopyState.RUNNING, CopyState.ENDED}:
            # Only a declaration that this node is dead lets a target run its copy without COMMIT. It was false, and stands.
            return SourceDecision.RECORD_COMMIT, "an operator declared this node dead, and the target runs the rank"
        if facts.restarted and facts.target is CopyState.UNREACHABLE:
            return SourceDecision.ASK_TARGET, "the daemon was restarted; only the target knows whether its copy may run"
        if facts.restarted and facts.target is CopyState.NO_SUCH_MOVE and not facts.peers_deny:
            return (
                SourceDecision.WAIT_FOR_PERSON,
                "the target has lost its record, and not every node denies that the rank ran there",
            )
    if facts.lease_expired:
        return SourceDecision.RECORD_ABORT, "the driver was silent for longer than its lease"
    return SourceDecision.WAIT, "the driver decides"


class TargetDecision(StrEnum):
    ASK_SOURCE = "ask the source"
    ACTIVATE = "activate"
    DISCARD = "discard"
    CLOSE = "close"


@dataclass(frozen=True)
class TargetFacts:
    mark: Mark
    outcome: Outcome | None  # from a token, or declared by an operator
    copy_exists: bool  # the restored tree exists


def target_next(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target daemon's next action for one move. Without an outcome it only asks."""
    if facts.mark is Mark.DISCARDED:
        return TargetDecision.CLOSE, "discarded"
    if facts.outcome is Outcome.COMMIT or facts.mark is Mark.ACTIVATED:
        if facts.copy_exists and facts.mark in {Mark.HELD, Mark.ACTIVATED}:
            return TargetDecision.ACTIVATE, "committed: the rank runs here"
        return TargetDecision.CLOSE, "committed, and the copy no longer exists"
    if facts.outcome is Outcome.ABORT:
        return TargetDecision.DISCARD, "aborted: the source goes on"
    return TargetDecision.ASK_SOURCE, "only the source knows how this ends"


def target_answer(facts: TargetFacts) -> CopyState:
    """The state of its copy that a target reports when asked."""
    match facts.mark:
        case Mark.DISCARDED:
            return CopyState.DISCARDED
        case Mark.ACTIVATED:
            return CopyState.RUNNING if facts.copy_exists else CopyState.ENDED
        case Mark.HELD:
            return CopyState.HELD if facts.copy_exists else CopyState.GONE
        case _:
            return CopyState.RECEIVING


class PeerDecision(StrEnum):
    ASK = "ask the source, then the target"
    LEARN_COMMIT = "write down COMMIT"
    LEARN_ABORT = "write down ABORT"
    MEND = "mend"  # revert an interrupted change, still filtered, so that no process stays stopped until the outcome
    FINISH = "point at the target"
    POINT_BACK = "point back"
    UNFILTER = "let the packets go"
    CLOSE = "close"


@dataclass(frozen=True)
class PeerFacts:
    mark: Mark
    outcome: Outcome | None  # recorded here, final
    interrupted: bool = False  # the change of the sockets here was interrupted
    source: Outcome | None = None  # the source's answer; None: it has not decided, or does not answer
    target: CopyState = CopyState.UNREACHABLE  # the target's answer, or what the source reports about it
    source_unknowing: bool = False  # its answer is that it does not know the move
    source_lost: bool = False  # it has not answered for so long that waiting is given up


def peer_next(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The next action of a daemon that has the peers' sockets of a rank's connections.

    A COMMIT counts here only once the target's copy runs. Until then the source may have to take the rank back, and a
    socket whose filter was dropped would talk to an address without a rank. A target that has dropped its copy never runs it.
    """
    if facts.mark is Mark.SETTLED:
        return PeerDecision.CLOSE, "settled"
    if facts.outcome is None:
        if facts.interrupted:
            return PeerDecision.MEND, "the change of the connections was cut short"
        if facts.source is Outcome.ABORT or facts.target is CopyState.DISCARDED:
            return PeerDecision.LEARN_ABORT, "the rank does not run at the target, and never will"
        if facts.target in {CopyState.RUNNING, CopyState.ENDED}:
            return PeerDecision.LEARN_COMMIT, "the target runs the rank"
        if facts.source_unknowing:
            # A source journals a move before it is announced to a peer, so this one never began, or both have forgotten it.
            untouched = facts.mark not in {Mark.REPOINTING, Mark.REPOINTED} and facts.target is not CopyState.HELD
            if untouched or facts.target is CopyState.NO_SUCH_MOVE:
                return PeerDecision.LEARN_ABORT, "the source does not know this move, and the target has no copy"
            return PeerDecision.ASK, "the source does not know this move, but the target may have a copy of the rank"
        if facts.source is Outcome.COMMIT:
            return PeerDecision.ASK, "committed, but the target has not let its copy go yet"
        if facts.source_lost and facts.target is CopyState.UNREACHABLE and facts.mark is not Mark.REPOINTED:
            return PeerDecision.LEARN_ABORT, "source and target are silent for too long"
        return PeerDecision.ASK, "the source has not decided yet, or does not answer"
    match facts.mark:
        case Mark.POINTED_BACK:
            return PeerDecision.UNFILTER, "aborted, and the ends here name the source again"
        case Mark.REPOINTED if facts.outcome is Outcome.COMMIT:
            return PeerDecision.UNFILTER, "committed, and the ends here name the target"
        case Mark.FILTERED if facts.outcome is Outcome.ABORT:
            return PeerDecision.UNFILTER, "aborted, and the ends here have not been changed"
        case Mark.FILTERED | Mark.REPOINTING if facts.outcome is Outcome.COMMIT:
            return PeerDecision.FINISH, "committed: the ends here belong to the target"
        case Mark.REPOINTING | Mark.REPOINTED:
            return PeerDecision.POINT_BACK, "aborted: the ends here belong to the source"
        case _:
            return PeerDecision.CLOSE, "nothing was touched here"


class GateDecision(StrEnum):
    ASK = "ask the source, then the target"
    LEARN_COMMIT = "write down COMMIT"
    LEARN_ABORT = "write down ABORT"
    OPEN = "open the gates"
    CLOSE = "close"


@dataclass(frozen=True)
class GateFacts:
    mark: Mark
    outcome: Outcome | None  # recorded here: the communicators have been built again, or never will be
    source: Outcome | None = None  # the source's answer; None: it has not decided, or does not answer
    source_undone: bool = False  # its answer is ABORT, and the rank runs there with its communicators, or has ended
    source_unknowing: bool = False  # its answer is that it does not know the move
    source_silent: bool = False  # it has not answered for longer than any undo takes
    target: CopyState = CopyState.UNREACHABLE
    source_lost: bool = False  # it has not answered for so long that waiting is given up
    down: bool = False  # a communicator of a process here is not attached, or that is not known
    abandoned: bool = False  # source or target says that they can never be built again


_NO_COPY = {CopyState.DISCARDED, CopyState.GONE, CopyState.NO_SUCH_MOVE, CopyState.RECEIVING}


def gate_next(facts: GateFacts) -> tuple[GateDecision, str]:
    """The next action of a daemon that has closed the gates of ranks whose communicators are changed.

    An open gate lets the job use its communicators, so they must be complete on every member first: after COMMIT once the
    target runs the rank, after ABORT once the source has built them again with its own copy. A gate that stays closed only
    costs time; one that opens early costs the job. So a silent source opens no gate behind which a communicator is down: it
    may be cut off, and still try. But a job whose communicators can never be built again must continue and see NCCL's
    errors: a member has ended, or an operator has declared the source or a member's node dead. Once this gate is open
    nothing is attached here for this move any more, so the move of a target that is still receiving cannot be committed
    afterwards.
    """
    if facts.mark is Mark.SETTLED:
        return GateDecision.CLOSE, "settled"
    if facts.outcome is not None:
        return GateDecision.OPEN, f"{facts.outcome}: the job goes on"
    if facts.target in {CopyState.RUNNING, CopyState.ENDED}:
        return GateDecision.LEARN_COMMIT, "the target runs the rank"
    if facts.source is Outcome.ABORT and facts.source_undone:
        left = "has ended the move without its communicators" if facts.abandoned else "has put the rank back"
        return GateDecision.LEARN_ABORT, f"the source {left}"
    if facts.abandoned and facts.target in _NO_COPY:
        return GateDecision.LEARN_ABORT, "the source was declared dead, and the target has no copy of the rank"
    if facts.down and (facts.source_unknowing or facts.source_silent):
        why = "does not know this move" if facts.source_unknowing else "is silent"
        return GateDecision.ASK, f"communicators are down here, and the source, which builds them again, {why}"
    if facts.source_unknowing and facts.target is not CopyState.HELD:
        return GateDecision.LEARN_ABORT, "the source does not know this move"
    if facts.source_silent and facts.target in _NO_COPY:
        return GateDecision.LEARN_ABORT, "the target has no copy of the rank, and the source is silent for too long"
    if facts.source_lost and facts.target is CopyState.UNREACHABLE:
        return GateDecision.LEARN_ABORT, "source and target are silent for too long"
    if facts.source is Outcome.ABORT:
        return GateDecision.ASK, "aborted, and the source has not built its communicators again yet"
    if facts.source is Outcome.COMMIT:
        return GateDecision.ASK, "committed, but the target has not let its copy go yet"
    return GateDecision.ASK, "the source has not decided yet, or does not answer"


def proof(nonce: bytes, what: str, move: str) -> bytes:
    """A token by which one daemon proves a state to another: HELD (by the target), COMMIT and ABORT (by the source)."""
    return hmac.digest(nonce, f"{what}:{move}".encode(), hashlib.sha256)


def proves(token: bytes, nonce: bytes, what: str, move: str) -> bool:
    return hmac.compare_digest(token, proof(nonce, what, move))
