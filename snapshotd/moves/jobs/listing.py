"""Lists the records of a coordinator, for `migrator job list` and for drivers. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.jobs import lost_time, records
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark


def all_records(
    journal: Journal,
    moves: Mapping[str, Moving],
    cut_off: Callable[[Collection[str]], str],
    kinds: Collection[str] | None = None,
) -> list[pb.JobRecord]:
    """`moves`: those that have not ended. `cut_off`: why this node may not coordinate the job with these ranks now. `kinds`:
    only records of these; None: all."""
    found = []
    for move_log in journal.all():
        begin, decided = move_log.begin, move_log.outcome
        if begin.role != "job" or not begin.job or (kinds is not None and begin.kind not in kinds):
            continue
        record = move_log.whole()
        moving = moves.get(move_log.move)
        by = records.ended_by(journal, move_log)
        is_over = bool(move_log.ended_unix_s) and (bool(record.suspension) or bool(by) or not move_log.committed)
        down_s, resumed_unix_s = lost_time.after_rollback(journal, move_log)
        found.append(
            pb.JobRecord(
                record=move_log.move,
                job=begin.job,
                user_id=begin.user_id,
                suspension=record.suspension,
                ranks=len(record.participants),
                # A history of large jobs would not fit into a message.
                participants=[] if is_over else [part.to_proto() for part in record.participants],
                outcome=pb.OutcomeKind.Value(decided.outcome.value) if decided is not None else pb.UNDECIDED,
                reason=decided.reason if decided is not None else "",
                decided_by=decided.decided_by if decided is not None else "",
                begun_unix_s=begin.begun_unix_s,
                ended_unix_s=move_log.ended_unix_s,
                waiting_for=moving.waiting_for if moving is not None else "",
                ended_by=by,
                kind=begin.kind,
                snapshot=record.snapshot,
                handed_to=record.handed_to,
                lost_s=record.lost_s,
                down_s=down_s,
                resumed_unix_s=resumed_unix_s,
                adopted_from=record.adopted_from,
                cut_off=cut_off(records.uids(move_log)) if begin.kind == "snapshot" and not by else "",
                quorums=[pb.Voters(nodes=voters) for voters in record.quorums],
                copies=record.asked_copies,
                nodes=[node.to_proto() for node in record.nodes] if begin.kind == "snapshot" and not is_over else [],
            )
        )
    return found


def outcome_of(journal: Journal, move_log: MoveLog) -> pb.Outcome:
    """The answer to participants of a record, and to its driver."""
    decided = move_log.outcome
    whole = move_log.whole()
    dropped = whole.dropped if move_log.begin.kind == "snapshot" else ""
    if decided is None:
        ended, tethered = records.before(journal, whole.suspension)
        return pb.Outcome(kind=pb.UNDECIDED, ended=ended, tethered=tethered)
    return pb.Outcome(
        kind=pb.OutcomeKind.Value(decided.outcome.value),
        reason=decided.reason,
        decided_by=decided.decided_by,
        settled=move_log.last_mark is Mark.SETTLED,
        dropped=dropped,
        handed_to=whole.handed_to,
        adopted_unix_s=whole.adopted_unix_s,
    )


def name_part(found: pb.Outcome, move_log: MoveLog, move: str) -> None:
    """Adds to the answer whose the move, or the copy, of one rank is: a node compares it with what it was told. Records of
    version 0.1 do not say whose the job is, and name nothing. A copy is named as the first one, whichever it is: daemons that
    know of no others compare it, too."""
    if move_log.begin.user_id < 0:
        return
    record = move_log.whole()
    found.job, found.user_id, found.copies = move_log.begin.job, move_log.begin.user_id, record.asked_copies
    for part in record.participants:
        asked = next((copy for copy in part.copies if copy.move == move), None)
        if asked is not None:
            named = msgspec.structs.replace(
                part, copy=asked.move, copy_node=asked.node, copy_endpoint=asked.endpoint, more_copies=()
            )
            found.participant.CopyFrom(named.to_proto())
        elif move == part.move:
            found.participant.CopyFrom(part.to_proto())
