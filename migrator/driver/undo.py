"""Ends a move that failed: undoes what can be undone, learns the outcome from the source, and says where the rank is."""

from __future__ import annotations

import contextlib

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from migrator import formatting, protocol
from migrator.driver import steps
from migrator.driver.result import result
from migrator.driver.run import Run
from migrator.protocol import ACTIVATE, COMMIT, PREPARE, TABLE, Step, Verdict
from migrator.results import MoveResult
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import OutcomeUnknown, RankGone, Refused, SnapshotError, Timeout, Unreachable, Where

#: How long to keep asking a source that cannot be reached to abort.
REACH_S = 60.0
#: How long to keep asking for an outcome that was not answered.
ASK_AGAIN_S = 20.0
ASK_EVERY_S = 0.5


async def end(run: Run, error: SnapshotError) -> MoveResult:
    """The result of a move whose step `run.reached` failed with `error`."""
    if run.reached < COMMIT:
        outcome = await _undo(run, error)
        return await _conclude(run, outcome, error)
    with contextlib.suppress(SnapshotError):  # makes the source ask the target now, not in its next round
        await run.source.source.Release(run.request, timeout_s=10)
    outcome = await _learn_outcome(run)
    if outcome is None and run.token:  # COMMIT was answered: the token can still be passed on
        outcome = pb.Outcome(kind=pb.COMMIT, token=run.token)
    if outcome is not None and outcome.kind != pb.COMMIT:
        outcome = await _undo(run, error, outcome)
    return await _conclude(run, outcome, error)


async def _undo(run: Run, error: SnapshotError, outcome: pb.Outcome | None = None) -> pb.Outcome | None:
    """Asks for the plan's steps. Returns the source's record; COMMIT if it turns out that Commit had succeeded."""
    for step in protocol.undo_plan(run.reached):
        with contextlib.suppress(SnapshotError), run.reporter.phase(step.phase, step.action):
            if step.action == "Abort":
                outcome = await _abort(run, error.headline[:500], step.timeout_s)
                if outcome is not None and outcome.kind == pb.COMMIT:  # the answer to Commit was lost
                    return outcome
                _pause_over(run)
            elif outcome is not None and outcome.kind == pb.ABORT:
                await _carry(run, step, outcome.token)
    return outcome


async def _carry(run: Run, step: Step, token: bytes) -> None:
    """Passes ABORT on to the participants of one step."""
    match step.action:
        case "Settle":
            await run.peers.settle(run.move, token, step.timeout_s)
        case "Open":
            for reason in await run.gates.open(run.move, token, step.timeout_s):
                run.reporter.note(f"gates open later on {reason}")
            _pause_over(run)
        case "Discard":
            request = pb.TokenRequest(move=run.move, token=token)
            await run.target.target.Discard(request, timeout_s=step.timeout_s)


def _pause_over(run: Run) -> None:
    """In an undone move the pause counts from the closing of the gates: ranks may have waited there for others."""
    since = run.gates_closed_at or run.paused_at
    if since is not None:
        run.paused_since(since)


async def _conclude(run: Run, outcome: pb.Outcome | None, error: SnapshotError) -> MoveResult:
    if outcome is not None and outcome.kind == pb.COMMIT and run.reached <= ACTIVATE:
        run.token = outcome.token
        with contextlib.suppress(SnapshotError):
            for run.reached in range(ACTIVATE, len(TABLE)):
                step = TABLE[run.reached]
                await steps.perform(run, step, step.timeout_s)
    kind = None if outcome is None else formatting.name_of(pb.OutcomeKind, outcome.kind)
    verdict, reason = protocol.decide(run.reached, kind)
    if verdict is Verdict.MOVED:
        return result(run, verdict, "", Where.TARGET_RUNNING, None)
    if verdict is Verdict.UNDONE:
        return _undone(run, outcome, error)
    where = Where.TARGET_HELD if kind == "COMMIT" else Where.UNKNOWN
    unknown = OutcomeUnknown(f"{reason} (first failure: {error.message})", where=where)
    return result(run, verdict, unknown.message, where, unknown)


def _undone(run: Run, outcome: pb.Outcome | None, error: SnapshotError) -> MoveResult:
    if isinstance(error, Refused) and run.reached <= PREPARE:
        return result(run, Verdict.REFUSED, error.message, Where.SOURCE_RUNNING, error)
    where = Where(outcome.where) if outcome is not None and outcome.where else Where.SOURCE_RUNNING
    where = Where.ENDED if error.where is Where.ENDED else where
    if where is Where.ENDED and not isinstance(error, RankGone):
        error = RankGone(f"rank {run.options.rank} ended during the move ({error.message})", where=where)
    reason = error.message
    if outcome is not None and where in {Where.SOURCE_FROZEN, Where.ENDED}:
        reason = f"{reason} ({outcome.reason})"
    return result(run, Verdict.UNDONE, reason, where, error)


async def _abort(run: Run, reason: str, timeout_s: float) -> pb.Outcome | None:
    """The record after Abort. A source that cannot be reached is asked again; one that fails is asked for its record."""
    request = pb.AbortRequest(move=run.move, reason=reason)
    attempts = AsyncRetrying(
        retry=retry_if_exception_type(Unreachable),
        stop=stop_after_delay(REACH_S),
        wait=wait_fixed(ASK_EVERY_S),
        retry_error_callback=lambda _: None,
    )
    try:
        outcome: pb.Outcome | None = await attempts(run.source.source.Abort, request, timeout_s=timeout_s)
        if outcome is None or outcome.kind != pb.UNDECIDED:
            return outcome
    except SnapshotError:
        pass
    return await _learn_outcome(run, decided=True)  # the source has to ask the target first


async def _learn_outcome(run: Run, *, decided: bool = False) -> pb.Outcome | None:
    """The source's record. With `decided`, an UNDECIDED answer is asked again, because Abort has been asked for."""

    def last_answer(state: RetryCallState) -> pb.Outcome | None:
        return None if state.outcome is None or state.outcome.failed else state.outcome.result()

    attempts = AsyncRetrying(
        retry=retry_if_exception_type((Unreachable, Timeout))
        | retry_if_result(lambda answer: decided and answer.kind == pb.UNDECIDED),
        stop=stop_after_delay(ASK_AGAIN_S),
        wait=wait_fixed(ASK_EVERY_S),
        retry_error_callback=last_answer,
    )
    try:
        return await attempts(run.source.source.GetOutcome, run.request, timeout_s=5)
    except SnapshotError:
        return None
