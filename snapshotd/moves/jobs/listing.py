"""Lists the records of a coordinator, for `migrator job list` and for drivers. Blocking."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.jobs import lost_time, records
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving


def all_records(
    journal: Journal, moves: Mapping[str, Moving], kinds: Collection[str] | None = None
) -> list[pb.JobRecord]:
    """`moves`: those that have not ended. `kinds`: only records of these; None: all."""
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
                nodes=[node.to_proto() for node in record.nodes] if begin.kind == "snapshot" and not is_over else [],
            )
        )
    return found
