"""Decides whether a job may be suspended, snapshotted, resumed or dropped now, from the records of its coordinator. Blocking.

Nothing is changed here. The caller holds the lock under which records begin and commit (coordinator.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, NotFound, Usage, Where, WrongState
from snapshotd.moves.jobs import records
from snapshotd.moves.jobs.rollback import rolled_back_already
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.record_parts import JobPart
from snapshotd.moves.rules import Mark

#: How long a resumption that is committed has at least to be carried out before an operator may drop its images.
SETTLES_S = 60.0


def must_be_possible(
    journal: Journal, moves: Sequence[Moving], request: pb.BeginJobRequest, parts: Sequence[JobPart]
) -> None:
    """Raises unless the job may be suspended, snapshotted or resumed now. `moves`: the records that are being carried out."""
    ranks = {part.rank_uid for part in parts}
    for moving in moves:
        if moving.log.outcome is None and records.uids(moving.log) & ranks:
            raise Busy(f"job {request.job} is being suspended or resumed already ({moving.log.move})")
    if not request.suspension:
        if before := records.rolled_back(journal, ranks):
            raise rolled_back_already(before)
        return
    suspension = journal.find(check_move_id(request.suspension))
    is_one = suspension is not None and suspension.begin.role == "job" and suspension.begin.kind != "snapshot"
    if suspension is not None and suspension.begin.kind == "rollback" and suspension.last_mark is not Mark.SETTLED:
        raise Busy(f"the processes of job {request.job} that was rolled back have not all ended yet")
    if suspension is None or not is_one or not suspension.committed:
        raise NotFound(f"job {request.job} is not suspended", remedy="`migrator job list` shows suspended jobs")
    record = suspension.whole()
    if ended := records.ended_by(journal, suspension):
        raise WrongState(
            f"the suspension of job {request.job} has ended ({ended})",
            remedy="`migrator ps` shows where its ranks are",
            where=Where.UNKNOWN,
        )
    for moving in moves:
        if moving.log.record.suspension == request.suspension and moving.log.record.taken_back:
            raise Busy(
                f"copies of job {request.job} that were resumed in vain may still run ({moving.log.move})",
                remedy="retry when `migrator job list` does not show that attempt any more",
                where=Where.UNKNOWN,
            )
    wanted = {part.rank_uid: {image for image, _, _ in records.images_of(part)} for part in record.participants}
    given = {part.rank_uid: part.image for part in parts}
    if given.keys() != wanted.keys() or not all(given[uid] in wanted[uid] for uid in given):
        raise Usage("a job is resumed with all ranks with which it was suspended, and no others")


def may_drop(journal: Journal, suspension: MoveLog) -> bool:
    """Whether a suspension is to be marked as dropped; not if it is already. Raises unless it may be."""
    known, job = suspension.whole(), suspension.begin.job
    if known.dropped:
        return False
    if known.suspension or not suspension.committed:
        raise WrongState(f"{suspension.move} is not a suspended job", where=Where.UNKNOWN)
    for other in journal.all():
        if other.begin.role != "job" or other.whole().suspension != suspension.move:
            continue
        if other.outcome is None:
            raise Busy(f"job {job} is being resumed ({other.move})")
        if other.committed and other.last_mark is Mark.SETTLED:
            raise WrongState(f"job {job} was resumed ({other.move})", where=Where.UNKNOWN)
        if other.committed and other.outcome.unix_s > time.time() - SETTLES_S:
            raise Busy(
                f"job {job} is being resumed ({other.move})",
                remedy=f"if it still is after {SETTLES_S:.0f} s, its images can be dropped although it runs",
            )
    return True
