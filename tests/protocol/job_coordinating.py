"""The coordinator of the model of jobs. The decisions are those of `snapshotd/moves/job_rules.py`."""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, JobDecision, Part
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.job_gating import JobGating
from tests.protocol.job_succeeding import Succeeding
from tests.protocol.job_world import Lost, Record, Refused


class Coordinating(Succeeding, JobGating):
    def on_job_begin(self, node: str, name: str, suspension: str, *parts: str) -> object:
        if (node, name) in self.journal:
            self.open(node, name, "job")
            return None
        self.must_hold(node)
        if any(r.role == "job" and not r.ended and r.outcome is None for r in self.records_of(node)):
            raise Refused("busy")
        if suspension:
            known = self.journal.get((node, suspension))
            if known is None or known.outcome is not Outcome.COMMIT or self.resumed(suspension):
                raise Refused("not suspended")
            if known.kind == "rollback" and not known.ended:
                raise Refused("processes of the former incarnation may run")
            if any(r.suspension == suspension and r.taken_back and not r.ended for r in self.records_of(node)):
                raise Refused("the copies of a resumption that was taken back may still run")
        elif self.rolled_back(node):
            raise Refused("rolled back")
        self.event(node, "mark begun")
        words = [part.split() for part in parts]
        listed = [(one[0], one[1], one[2], one[3]) for one in words]
        copies = [list(zip(one[4::2], one[5::2], strict=True)) for one in words if len(one) > 4]
        kind = "snapshot" if copies else ""
        self.journal[node, name] = Record(
            "job", Mark.BEGUN, parts=listed, copies=copies, suspension=suspension, kind=kind, gated=self.nccl
        )
        self.journal[node, name].incarnation = next((c.incarnation for c in self.copies if c.running), "")
        self.begun_at[name] = node
        if copies:
            self.begin_lease(node, name)
        return None

    def resumed(self, suspension: str) -> bool:
        return any(
            r.role == "job" and r.suspension == suspension and r.outcome is Outcome.COMMIT
            for r in self.journal.values()
        )

    def on_job_commit(self, node: str, name: str) -> object:
        record = self.journal.get((node, name))
        if record is None:
            raise Refused("no such record")
        if record.outcome is None:
            ready, why = job_rules.may_commit(self.ask_parts(node, record))
            if not ready:
                raise Refused(why)
            if not record.suspension and self.rolled_back(node):
                raise Refused("rolled back")
            self.must_hold(node)
            self.decide(node, record, Outcome.COMMIT)
            self.protected |= record.kind == "snapshot"
        return record.outcome

    def on_job_confirm(self, node: str, name: str) -> object:
        """What the coordinator of a snapshot does by itself, and what the driver waits for."""
        self.settle_job(node, name)
        self.renew(node)
        record = self.journal[node, name]
        told = [voter for voter in record.voters if (voter, name) in self.settled]
        few = len(record.voters) < job_rules.MIN_VOTERS
        if not record.ended or not (few or job_rules.is_majority(record.voters, told)):
            raise Refused("not all nodes have confirmed it")
        return None

    def on_job_abort(self, node: str, name: str) -> object:
        if (node, name) not in self.journal:
            self.event(node, "record ABORT")
            self.journal[node, name] = Record("job", Mark.SETTLED, outcome=Outcome.ABORT, ended=True)
        return self.decide(node, self.journal[node, name], Outcome.ABORT)

    def on_job_outcome(self, node: str, name: str) -> object:
        record = self.journal.get((node, name))
        if record is None:
            return Answer.UNKNOWN
        if record.suspension and record.outcome is Outcome.COMMIT and not record.ended:
            self.must_hold(node)  # no copy is let run
        return Answer.UNDECIDED if record.outcome is None else Answer(record.outcome.value)

    def ask_parts(self, node: str, record: Record) -> dict[str, Part]:
        found: dict[str, Part] = {}
        for at, move in record.places:
            try:
                found[at + move] = Part(str(self.call(node, at, "part", move)))
            except (Lost, Refused):
                found[at + move] = Part.UNREACHABLE
        return found

    def settle_job(self, node: str, name: str) -> None:
        record = self.journal[node, name]
        if record.kind == "rollback":
            self.settle_rollback(node, name)
            return
        parts: dict[str, Part] = {}
        for _ in range(3):
            decision, _ = job_rules.job_next(
                record.mark,
                record.outcome,
                parts.values(),
                lease_expired=not record.lease,
                resumes=bool(record.suspension),
            )
            match decision:
                case JobDecision.RECORD_ABORT:
                    self.decide(node, record, Outcome.ABORT)
                case JobDecision.ASK if not parts:
                    parts = self.ask_parts(node, record)
                case JobDecision.TAKE_BACK:
                    self.event(node, "mark taken back")
                    record.taken_back = True
                    self.event(node, "overrule: ABORT")
                    record.outcome, parts = Outcome.ABORT, {}
                case JobDecision.END:
                    for at, move, _, _ in record.parts:
                        self.call(node, at, "end", move)
                    return
                case JobDecision.CLOSE if not record.ended:
                    self.put_back(node, name)
                    drops = record.suspension and self.journal[node, record.suspension].kind != "rollback"
                    if record.outcome is Outcome.COMMIT and drops:
                        for _, _, at, image in record.parts:
                            self.call(node, at, "drop", image)
                    if record.outcome is Outcome.COMMIT and record.kind == "snapshot":
                        self.replace_older(node, record)
                    self.put(node, record, Mark.SETTLED)
                case _:
                    return

    def replace_older(self, node: str, newer: Record) -> None:
        """A node that does not answer asks later: see `settle_kept`."""
        for older in [r for (at, _), r in self.journal.items() if at == node and r.role == "job" and r is not newer]:
            if older.kind == "snapshot" and older.outcome is Outcome.COMMIT and not older.dropped:
                self.event(node, "mark dropped")
                older.dropped = True
                for at, image in older.places:
                    with suppress(Lost, Refused):
                        self.call(node, at, "drop", image)
