"""Rollbacks in the model of jobs: the coordinator's record, nodes that end an incarnation, and nodes that are cut off."""

from __future__ import annotations

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, Ended, JobDecision, Part
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.job_world import NODES, JobWorld, Lost, Record, Refused


class Rolling(JobWorld):
    def on_job_rollback(self, node: str, name: str, snapshot: str) -> object:
        if (node, name) in self.journal:
            return self.journal[node, name].outcome
        taken = self.journal.get((node, snapshot))
        if taken is None or taken.outcome is not Outcome.COMMIT or taken.dropped:
            raise Refused("no such snapshot")
        for record in self.journal.values():
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
        for record in self.journal.values():
            if record.role == "job" and record.kind == "snapshot":
                self.decide(node, record, Outcome.ABORT)
        self.event(node, "mark begun")
        made = self.journal[node, name] = Record(
            "job", Mark.BEGUN, parts=taken.parts, copies=taken.copies, kind="rollback"
        )
        made.ends = self.incarnation(snapshot)
        made.snapshot = snapshot
        return self.decide(node, made, Outcome.COMMIT)

    def must_be_kept(self, node: str, snapshot: Record) -> None:
        """Refuses unless every rank is bound to the coordinator, or its node was declared dead."""
        parts: dict[str, Part] = {}
        for at, move, _, _ in [] if snapshot.ended else snapshot.parts:
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
            if at == node and record.kind == "rollback" and record.outcome is Outcome.COMMIT and name not in followed:
                return name
        return ""

    def incarnation(self, snapshot: str) -> str:
        rollbacks = {name for (_, name), r in self.journal.items() if r.kind == "rollback" and r.snapshot == snapshot}
        found = [
            name
            for (_, name), r in self.journal.items()
            if r.role == "job" and r.suspension in rollbacks and r.outcome is Outcome.COMMIT
        ]
        return found[-1] if found else self.journal[NODES[0], snapshot].incarnation

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
            self.call(node, at, "end_ranks", name, incarnation)
        except Refused:
            return Ended.NOT_YET
        except Lost:
            if at not in self.off and at not in self.cut and node not in self.cut:
                return Ended.DAEMON_DOWN
            return job_rules.silent_node(job_rules.FENCED_S if (node, at) in self.silent else 0.0)
        return Ended.ENDED

    def on_end_ranks(self, node: str, _name: str, incarnation: str) -> object:
        self.event(node, "record that the incarnation has ended")
        self.over.add((node, incarnation))
        self.end_over(node)
        for copy in self.copies:
            if copy.node == node and copy.alive and copy.incarnation == incarnation:
                if why := job_rules.may_not_end(copy.bound_to, NODES[0]):
                    raise Refused(why)
                raise Refused("a held copy waits for the outcome of its move")
        return None

    def end_over(self, node: str) -> None:
        """Ends copies of incarnations that are over, as far as they were let run here."""
        held = [
            r.copy for (at, _), r in self.journal.items() if at == node and r.role == "target" and r.mark is Mark.HELD
        ]
        for copy in self.copies:
            if copy.node != node or not copy.alive or copy in held or (node, copy.incarnation) not in self.over:
                continue
            if copy.bound_to:
                self.event(node, "end a rank")
                copy.alive = copy.running = False

    def pass_time(self) -> None:
        """So long that nodes that are cut off have ended their ranks, and a coordinator counts them."""
        for node in NODES:
            cut = node in self.cut or NODES[0] in self.cut
            if cut and self.up[node] and node != NODES[0]:
                for copy in self.copies:
                    if copy.node == node and copy.bound_to:
                        self.over.add((node, copy.incarnation))
                self.end_over(node)
            if (cut and self.up[node]) or node in self.off:
                self.silent.add((NODES[0], node))

    def may_run(self, node: str) -> None:
        """What a node asks its coordinator every few seconds."""
        if (NODES[0], node) in self.silent and not (node in self.cut or node in self.off):
            self.silent.discard((NODES[0], node))
        for record in [r for (at, _), r in self.journal.items() if at == NODES[0] and r.kind == "rollback"]:
            if record.outcome is Outcome.COMMIT and self.up[node] and self.ask(node, record) is not Answer.UNREACHABLE:
                self.over.add((node, record.ends))
                self.end_over(node)
