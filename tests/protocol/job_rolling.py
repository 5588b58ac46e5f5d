"""Rollbacks in the model of jobs: the coordinator's record, nodes that end an incarnation, and nodes that are cut off."""

from __future__ import annotations

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Ended, JobDecision, Part
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.job_world import NODES, JobWorld, Lost, Record, Refused


class Rolling(JobWorld):
    def on_job_rollback(self, node: str, name: str, snapshot: str) -> object:
        if (node, name) in self.journal:
            return self.journal[node, name].outcome
        taken = self.journal.get((node, snapshot))
        if taken is None or taken.outcome is not Outcome.COMMIT or taken.dropped or taken.handed_to:
            raise Refused("no such snapshot")
        self.must_hold(node)
        for record in self.records_of(node):
            if record.role == "job" and not record.ended and record.kind != "snapshot":
                raise Refused("busy")
        if self.rolled_back(node):
            raise Refused("rolled back already")
        later = list(self.journal)[list(self.journal).index((node, snapshot)) :]
        for key in later:
            other = self.journal[key]
            if other.role == "job" and not other.kind and not other.suspension and other.outcome is Outcome.COMMIT:
                raise Refused("suspended since")
        self.must_be_kept(node, taken)
        ends = self.must_be_of(node, taken, self.incarnation(node, snapshot))
        for record in self.records_of(node):
            if record.role == "job" and record.kind == "snapshot":
                self.decide(node, record, Outcome.ABORT)
        self.event(node, "mark begun")
        made = self.journal[node, name] = Record(
            "job", Mark.BEGUN, parts=taken.parts, copies=taken.copies, kind="rollback"
        )
        made.ends, made.snapshot = ends, snapshot
        self.begun_at[name] = node
        return self.decide(node, made, Outcome.COMMIT)

    def must_be_kept(self, node: str, snapshot: Record) -> None:
        """Refuses unless every rank is bound to the coordinator, or its node was declared dead."""
        parts: dict[str, Part] = {}
        current = [r for r in self.records_of(node) if r.voters and not r.dropped and not r.handed_to]
        bound = any(r.ended and r.outcome is Outcome.COMMIT for r in current)
        for at, move, _, _ in [] if bound else snapshot.parts:
            try:
                parts[at] = Part(str(self.call(node, at, "part", move)))
            except Lost:
                parts[at] = Part.UNREACHABLE
        if job_rules.unbound(parts, self.declared):
            raise Refused("not every rank is bound yet")

    def rolled_back(self, node: str) -> str:
        """The rollback that was decided, and not followed by a resumption."""
        followed = {r.suspension for r in self.journal.values() if r.role == "job" and r.outcome is Outcome.COMMIT}
        for (at, name), record in self.journal.items():
            decided = record.kind == "rollback" and record.outcome is Outcome.COMMIT and not record.dropped
            if at == node and decided and name not in followed:
                return name
        return ""

    def records_of(self, node: str) -> list[Record]:
        return [record for (at, _), record in self.journal.items() if at == node]

    def must_hold(self, node: str) -> None:
        """Refuses unless this node has its lease, if it needs one."""
        if node in self.lapsed and any(r.voters and not r.handed_to and not r.dropped for r in self.records_of(node)):
            raise Refused("cut off from most nodes")

    def must_be_of(self, node: str, taken: Record, ends: str) -> str:
        """The incarnation that is to end. A coordinator that took the snapshot over asks all nodes which one runs."""
        seen = {c.incarnation for c in self.copies if c.running and self.up[c.node] and not self.apart(node, c.node)}
        if taken.adopted and len(seen) == 1:
            return seen.pop()
        if seen - {ends}:
            raise Refused("another incarnation runs")
        return ends

    def incarnation(self, node: str, snapshot: str) -> str:
        rollbacks = {name for (_, name), r in self.journal.items() if r.kind == "rollback" and r.snapshot == snapshot}
        found = [
            name
            for (_, name), r in self.journal.items()
            if r.role == "job" and r.suspension in rollbacks and r.outcome is Outcome.COMMIT
        ]
        return found[-1] if found else self.journal[node, snapshot].incarnation

    def settle_rollback(self, node: str, name: str) -> None:
        record = self.journal[node, name]
        if record.outcome is None:
            self.decide(node, record, Outcome.ABORT)
            self.put(node, record, Mark.SETTLED)
            return
        answers = {at: self.ask_ended(node, at, name, record.ends) for at in NODES if at not in self.declared}
        if job_rules.rollback_next(answers)[0] is JobDecision.CLOSE:
            self.put(node, record, Mark.SETTLED)

    def ask_ended(self, node: str, at: str, name: str, incarnation: str) -> Ended:
        try:
            self.call(node, at, "end_ranks", name, incarnation, node)
        except Refused:
            return Ended.NOT_YET
        except Lost:
            if not self.apart(node, at):
                return Ended.DAEMON_DOWN
            if self.is_fenced(node, at, name):
                return Ended.CUT_OFF
            return job_rules.silent_node(job_rules.FENCED_S if (node, at) in self.silent else 0.0)
        return Ended.ENDED

    def is_fenced(self, node: str, at: str, rollback: str) -> bool:
        """Whether it is the former coordinator, whose lease is over."""
        return self.journal[node, self.journal[node, rollback].snapshot].fenced == at

    def on_end_ranks(self, node: str, _name: str, incarnation: str, caller: str) -> object:
        self.event(node, "record that the incarnation has ended")
        self.over.add((node, incarnation, caller))
        self.end_over(node)
        for copy in self.copies:
            if copy.node == node and copy.alive and copy.incarnation == incarnation:
                if why := job_rules.may_not_end(copy.bound_to, caller):
                    raise Refused(why)
                raise Refused("a held copy waits for the outcome of its move")
        return None

    def end_over(self, node: str) -> None:
        """Ends copies of incarnations that are over, as far as they were let run here."""
        held = [
            r.copy for (at, _), r in self.journal.items() if at == node and r.role == "target" and r.mark is Mark.HELD
        ]
        for copy in self.copies:
            if copy.node == node and copy.alive and copy not in held and self.is_over(copy):
                self.event(node, "end a rank")
                copy.alive = copy.running = False

    def pass_time(self) -> None:
        """So long that nodes that are cut off have ended their ranks, and then, that others count on it."""
        self.cut_off_passes()
        for node in NODES:
            for other in NODES:
                counts = other in self.off or (self.apart(node, other) and self.up[other])
                if node != other and counts and self.up[node]:
                    self.silent.add((node, other))
        self.leases_are_renewed()

    def cut_off_passes(self) -> None:
        """CUT_OFF_S."""
        self.leases_lapse()
        for copy in self.copies:
            coordinator = copy.bound_to
            if not copy.alive or not coordinator or not self.up[copy.node]:
                continue
            lapsed = coordinator in self.lapsed and self.up[coordinator]
            if lapsed or self.apart(copy.node, coordinator):
                self.over.add((copy.node, copy.incarnation, coordinator))
        for node in NODES:
            if self.up[node]:
                self.end_over(node)

    def leases_lapse(self) -> None:
        """Overridden: coordinators that most nodes do not follow any more end their ranks."""

    def leases_are_renewed(self) -> None:
        """Overridden: coordinators ask the nodes that follow them."""

    def may_run(self, node: str) -> None:
        """What a node asks the coordinators of its ranks every second."""
        for copy in [c for c in self.copies if c.node == node and c.alive and c.bound_to and self.up[node]]:
            at = copy.bound_to
            if self.apart(node, at) or not self.up[at]:
                continue
            rollbacks = [r for r in self.records_of(at) if r.kind == "rollback" and r.outcome is Outcome.COMMIT]
            if any(record.ends == copy.incarnation for record in rollbacks):
                self.over.add((node, copy.incarnation, at))
            elif after := next((r.handed_to for r in self.records_of(at) if r.handed_to), ""):
                copy.bound_to = after
        self.end_over(node)
