"""What a coordinator's journal says about a job: its suspension, its snapshots, its incarnation.

All of it is blocking: the records of moves that have ended are read from the disk.

A job is the set of its ranks, by their uids: a name may be given again to the next job.

Invariant: of each job that was snapshotted, the newest complete snapshot is kept until a newer one is complete on all nodes,
or the job has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.record_parts import JobPart

#: How many records that have ended copies a resumption names.
MAX_ENDED = 3


def uids(move_log: MoveLog) -> set[str]:
    """The ranks of the record's job. They are journalled when it begins, and never change."""
    if isinstance(move_log.known, MoveRecord):
        return {part.rank_uid for part in move_log.known.participants}
    return set(_uids_in(move_log.folder))


@lru_cache(maxsize=4096)
def _uids_in(folder: Path) -> frozenset[str]:
    return frozenset(part.rank_uid for part in MoveLog.read(folder).whole().participants)


def of_ranks(journal: Journal, wanted: set[str]) -> list[MoveLog]:
    """All records about these ranks, the oldest first."""
    return [one for one in journal.all() if one.begin.role == "job" and uids(one) & wanted]


def current(journal: Journal) -> list[MoveLog]:
    """All complete snapshots that were not given up, the oldest first."""
    return [
        one
        for one in journal.all()
        if (one.begin.role, one.begin.kind) == ("job", "snapshot") and one.committed and is_current(one)
    ]


def handed_over(journal: Journal) -> list[MoveLog]:
    """The snapshots that another node coordinates now, and may still need."""
    mine = [one for one in journal.all() if (one.begin.role, one.begin.kind) == ("job", "snapshot") and one.committed]
    return [one for one in mine if one.whole().handed_to and not one.whole().dropped]


def successor(journal: Journal, ranks: set[str]) -> tuple[str, str] | None:
    """The node that coordinates the job with these ranks now, if this one has coordinated it before, and its endpoint."""
    mine = [one for one in of_ranks(journal, ranks) if one.begin.kind == "snapshot" and one.committed]
    handed_to = mine[-1].whole().handed_to if mine else ""
    return (handed_to, endpoint(mine[-1], handed_to)) if handed_to else None


def endpoint(snapshot: MoveLog, node: str) -> str:
    """Of a node of the cluster, as the driver named it; empty: the driver did not."""
    return next((one.endpoint for one in snapshot.whole().nodes if one.name == node), "")


def is_current(snapshot: MoveLog) -> bool:
    """Whether a complete snapshot was neither given up nor handed over to another coordinator."""
    known = snapshot.whole()
    return not known.dropped and not known.handed_to


def replaced_by(journal: Journal, newer: MoveLog) -> list[MoveLog]:
    """The earlier snapshots of the same job."""
    ranks, begun = uids(newer), newer.begin.begun_unix_s
    mine = [one for one in current(journal) if uids(one) & ranks]
    return [one for one in mine if one is not newer and one.begin.begun_unix_s <= begun]


def suspended_since(journal: Journal, snapshot: MoveLog) -> MoveLog | None:
    """The suspension of the job that was committed after this snapshot. What runs since, if anything, is another incarnation
    than the one of the snapshot."""
    for one in of_ranks(journal, uids(snapshot)):
        later = one.begin.begun_unix_s >= snapshot.begin.begun_unix_s and one.committed and not one.begin.kind
        if later and not one.whole().suspension:
            return one
    return None


def incarnation(journal: Journal, snapshot: MoveLog) -> str:
    """The incarnation of the job that runs now: that of the last resumption after a rollback to this snapshot, or the one
    that was snapshotted."""
    rollbacks = {
        one.move
        for one in journal.all()
        if (one.begin.role, one.begin.kind) == ("job", "rollback") and one.whole().snapshot == snapshot.move
    }
    resumed = [one.move for one in journal.all() if one.begin.role == "job" and _resumes(one, rollbacks)]
    return resumed[-1] if resumed else snapshot.whole().participants[0].incarnation


def rolled_back(journal: Journal, ranks: set[str]) -> MoveLog | None:
    """The rollback of the job with these ranks that was decided, and not followed by a resumption yet."""
    mine = of_ranks(journal, ranks)
    for one in mine:
        decided = one.begin.kind == "rollback" and one.committed and not one.whole().dropped
        if decided and not any(_resumes(other, {one.move}) for other in mine):
            return one
    return None


def _resumes(move_log: MoveLog, suspensions: set[str]) -> bool:
    return move_log.committed and move_log.whole().suspension in suspensions


def before(journal: Journal, suspension: str) -> tuple[str, bool]:
    """For a resumption: the last records by which copies of the job that ran were ended, and whether it follows a
    rollback."""
    known = journal.find(suspension) if suspension else None
    if known is None:
        return "", False
    tethered = known.begin.kind == "rollback"
    ended = [known.move] if tethered else []
    for one in journal.all():
        record = one.whole() if one.begin.role == "job" and one.aborted else None
        if record is not None and record.taken_back and record.suspension == suspension:
            ended.append(one.move)
    return " ".join(ended[-MAX_ENDED:]), tethered


def images_of(part: JobPart) -> Iterator[tuple[str, str, str]]:
    """(image, node, endpoint) of all places that have the image of a rank."""
    yield part.move, part.node, part.endpoint
    for copy in part.copies:
        yield copy.move, copy.node, copy.endpoint


def buddies_of(part: JobPart) -> list[JobPart]:
    """The buddies, as participants."""
    return [
        msgspec.structs.replace(part, move=copy.move, node=copy.node, endpoint=copy.endpoint) for copy in part.copies
    ]


def resumed_by(journal: Journal, suspension: MoveLog) -> MoveLog | None:
    """The record that resumed a suspended job. Blocking."""
    for other in journal.all():
        if other.begin.role == "job" and other.committed and other.whole().suspension == suspension.move:
            return other
    return None


def ended_by(journal: Journal, suspension: MoveLog) -> str:
    """The record that resumed a suspended job, or why an operator gave it up; empty while it is suspended. Blocking."""
    if dropped := suspension.whole().dropped:
        return f"dropped: {dropped}"
    by = resumed_by(journal, suspension)
    return by.move if by is not None else ""


def is_needed(journal: Journal, move_log: MoveLog) -> bool:
    """Whether a record must stay: of a job that is suspended, or the proof that it was resumed. Blocking."""
    if not move_log.committed:
        return False
    if move_log.begin.kind == "snapshot":
        whole = move_log.whole()
        return not whole.dropped or bool(whole.quorums and not whole.let_go and not whole.handed_to)
    if move_log.begin.kind == "rollback" and any(uids(one) & uids(move_log) for one in current(journal)):
        return True  # a node that comes back late asks whether its ranks may run
    if suspension := move_log.whole().suspension:
        return journal.find(suspension) is not None
    return not ended_by(journal, move_log)


def is_given_up(journal: Journal, move_log: MoveLog) -> bool:
    """Whether an operator has dropped the images of this record's suspension. Blocking."""
    record = move_log.whole()
    suspension = journal.find(record.suspension) if record.suspension else None
    return bool(record.dropped or (suspension is not None and suspension.whole().dropped))


def drops_images(journal: Journal, suspension: str) -> bool:
    """Whether the images of a suspension are of no use once the job runs again. Those of a snapshot stay after a rollback:
    the job is protected by them until it has a newer one."""
    known = journal.find(suspension) if suspension else None
    return known is None or known.begin.kind != "rollback"
