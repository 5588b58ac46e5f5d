"""Builds the result of a move from what the driver knows at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from migrator import formatting
from migrator.driver.run import Run
from migrator.protocol import Verdict
from migrator.results import MoveResult
from snapshotd.api.errors import SnapshotError, Undone, Where


def result(run: Run, verdict: Verdict, reason: str, where: Where, error: SnapshotError | None) -> MoveResult:
    """How the move ended. An undone move exits with 11 for every error, unless the rank itself has ended."""
    keeps_code = verdict in {Verdict.REFUSED, Verdict.UNKNOWN} or where is Where.ENDED
    exit_code = 0 if error is None else (error.exit_code if keeps_code else Undone.exit_code)
    if verdict is Verdict.UNDONE and run.pause_s and where is not Where.ENDED:
        still = " so far" if where is Where.SOURCE_FROZEN else ""
        between = "\n  " if "\n" in reason else "; "
        reason = f"{reason}{between}the job was paused for {formatting.seconds(run.pause_s)}{still}"
    return MoveResult(
        move=run.move,
        job=run.found.rank.job,
        user_id=run.found.rank.user_id,
        rank=run.found.rank.rank,
        source=run.found.node,
        target=run.options.to,
        outcome=verdict,
        pause_s=run.pause_s,
        bytes=run.total_bytes or run.reporter.bytes_sent,
        phases=run.reporter.phases,
        parts=run.parts,
        gpu_pairs=[(pair.old_uuid, pair.new_uuid) for pair in run.prepared.gpu_pairs],
        device_bytes=run.frozen.device_bytes,
        device_bytes_left=run.frozen.device_bytes_left,
        reason=reason,
        where=where,
        error_code=error.code if error is not None else "",
        remedy=error.advice if error is not None else "",
        exit_code=exit_code,
        longest_part=max(run.parts[run.parts_before_pause :], key=lambda part: part.seconds, default=None),
        warnings=[*run.warnings, *run.frozen.warnings],
        precopied_bytes=run.precopied_bytes,
        peers_stopped_s=run.peers.stopped_s,
        predicted_s=run.estimate.pause_s if run.estimate is not None else 0.0,
    )


def after_attempts(last: MoveResult, undone: Sequence[MoveResult]) -> MoveResult:
    """The result of a move that took several attempts. The earlier ones have paused the job, so it is not "refused"."""
    earlier = [one for one in undone if one is not last]
    if not earlier:
        return last
    warnings = [f"attempt {number}: {one.reason}" for number, one in enumerate(earlier, 1)]
    last = replace(last, attempts=len(earlier) + 1, warnings=[*warnings, *last.warnings])
    if last.outcome is Verdict.REFUSED:
        return replace(last, outcome=Verdict.UNDONE, exit_code=Undone.exit_code)
    return last
