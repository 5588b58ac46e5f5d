"""What a rollback has cost a job: the work that was lost, and the time for which it did not run. Blocking.

Invariant: neither is ever understated. The snapshot counts as taken when it began, and a time that this node cannot know is
unknown, not zero.
"""

from __future__ import annotations

from typing import TypedDict

from snapshotd.moves.jobs import records
from snapshotd.moves.journal import Journal, MoveLog

DAY_S = 86400.0


class Cost(TypedDict):
    """The fields that are journalled with a rollback."""

    lost_s: float | None
    down_for_s: float


def at_rollback(journal: Journal, snapshot: MoveLog, down_for_s: float, now_unix_s: float) -> Cost:
    """What is lost if the job is rolled back now. `down_for_s`: for how long it has not run, as the driver says."""
    began = _ran_since(journal, snapshot)
    if began is None:
        return Cost(lost_s=None, down_for_s=min(max(0.0, down_for_s), DAY_S))
    since_s = max(0.0, now_unix_s - began)
    down_s = min(max(0.0, down_for_s), since_s)
    return Cost(lost_s=since_s - down_s, down_for_s=down_s)


def after_rollback(journal: Journal, move_log: MoveLog) -> tuple[float, float]:
    """For how long the job did not run, and when it went on; both 0 if it has not, or if this is not a rollback."""
    if move_log.begin.kind != "rollback":
        return 0.0, 0.0
    by = records.resumed_by(journal, move_log)
    if by is None or by.outcome is None:
        return 0.0, 0.0
    down_s = move_log.whole().down_for_s + by.outcome.unix_s - move_log.begin.begun_unix_s
    return max(0.0, down_s), by.outcome.unix_s


def _ran_since(journal: Journal, snapshot: MoveLog) -> float | None:
    """When the work began that a rollback to this snapshot loses: at the snapshot, or when the job was last resumed from it.
    What was lost before that was counted then."""
    resumed = [
        after_rollback(journal, one)[1]
        for one in journal.all()
        if (one.begin.role, one.begin.kind) == ("job", "rollback") and one.whole().snapshot == snapshot.move
    ]
    return max(resumed, default=0.0) or _taken_unix_s(journal, snapshot)


def _taken_unix_s(journal: Journal, snapshot: MoveLog) -> float | None:
    if not snapshot.whole().adopted_from:
        return snapshot.begin.begun_unix_s
    # The record is younger than the snapshot, because another node kept it before. The images are as old.
    images = [one.begin.begun_unix_s for one in journal.all() if one.begin.coordinator == snapshot.move]
    return min(images, default=None)
