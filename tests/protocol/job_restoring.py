"""The targets of the model of jobs. The decisions are those of `rules.target_next`."""

from __future__ import annotations

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, CopyDecision
from snapshotd.moves.rules import CopyState, Mark, Outcome, TargetDecision, TargetFacts, target_answer, target_next
from tests.protocol.job_gating import JobGating
from tests.protocol.job_world import NODES, Copy, Record, Refused, Unreadable


class Restoring(JobGating):
    def on_prepare(self, node: str, move: str, rank: str, image: str, coordinator: str) -> object:
        if (node, move) in self.journal:
            self.open(node, move, "target", Mark.PREPARED)
            return None
        if self.call(node, self.begun_at[coordinator], "job_outcome", coordinator) is not Answer.UNDECIDED:
            raise Refused("the resumption has ended")
        self.event(node, "mark prepared")
        self.journal[node, move] = Record(
            "target", Mark.PREPARED, coordinator, rank=int(rank), image=image, in_life=self.life[node]
        )
        return None

    def on_prepare_copy(self, node: str, move: str, rank: str, coordinator: str) -> object:
        if (node, move) in self.journal:
            self.open(node, move, "target", Mark.PREPARED)
            return None
        if self.call(node, self.begun_at[coordinator], "job_outcome", coordinator) is not Answer.UNDECIDED:
            raise Refused("the snapshot has ended")
        self.event(node, "mark prepared")
        self.journal[node, move] = Record(
            "target", Mark.PREPARED, coordinator, rank=int(rank), kind="copy", in_life=self.life[node]
        )
        return None

    def settle_copy(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        for _ in range(3):
            said = self.ask(node, record) if record.outcome is None else Answer.UNDECIDED
            match job_rules.copy_next(record.mark, record.outcome, said)[0]:
                case CopyDecision.RECORD_COMMIT:
                    self.decide(node, record, Outcome.COMMIT)
                case CopyDecision.RECORD_ABORT:
                    self.decide(node, record, Outcome.ABORT)
                case CopyDecision.KEEP:
                    self.put(node, record, Mark.SETTLED)
                case CopyDecision.DROP:
                    self.event(node, "drop the copy")
                    self.kept.pop((node, move), None)
                    self.put(node, record, Mark.DISCARDED)
                case _:
                    return

    def on_seal(self, node: str, move: str) -> object:
        record = self.open(node, move, "target", Mark.PREPARED, Mark.SEALED)
        if record.in_life < self.life[node]:
            raise Refused("restarted in the middle")
        if record.kind == "copy":
            self.kept[node, move] = record.coordinator, record.rank
        else:
            self.received.add((node, move))
        self.put(node, record, Mark.SEALED)
        return None

    def on_restore(self, node: str, move: str) -> object:
        record = self.open(node, move, "target", Mark.SEALED, Mark.HELD)
        if record.mark is Mark.SEALED:
            if (node, move) not in self.received:
                raise Refused("no image")
            if any((on, record.image) in self.unreadable for on in NODES):  # what was not noticed before
                raise Unreadable(record.image)
            self.put(node, record, Mark.RESTORING)
            record.copy = Copy(record.rank, node, record.coordinator, bound_to=self.coordinator_of(record))
            record.copy.gated, record.copy.comm = self.nccl, 0 if self.nccl else 1
            self.copies.append(record.copy)
            self.event(node, "criu restore")
            self.put(node, record, Mark.HELD)
        if not record.copy_exists:
            raise Refused("the copy is gone")
        return None

    def on_activate(self, node: str, move: str) -> object:
        self.settle_target(node, move)
        record = self.journal.get((node, move))
        if record is None or record.mark not in (Mark.ACTIVATED, Mark.SETTLED):
            raise Refused("it does not run yet")
        return None

    def on_discard(self, node: str, move: str) -> object:
        if (node, move) in self.journal:
            self.settle_target(node, move)
        return None

    def on_end(self, node: str, move: str) -> object:
        """The coordinator ends a copy that runs: the resumption was taken back."""
        record = self.journal[node, move]
        if record.copy is not None and record.copy.alive:
            self.event(node, "end the copy")
            record.copy.alive = record.copy.running = False
        return None

    def target_facts(self, record: Record) -> TargetFacts:
        return TargetFacts(record.mark, record.outcome, record.copy_exists)

    def settle_target(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        if record.kind == "copy":
            self.settle_copy(node, move)
            return
        for _ in range(3):
            match target_next(self.target_facts(record))[0]:
                case TargetDecision.ACTIVATE:
                    if record.mark is not Mark.ACTIVATED:
                        self.put(node, record, Mark.ACTIVATED)
                    self.event(node, "wake")
                    if record.copy is not None and self.is_over(record.copy):
                        record.copy.alive = record.copy.running = False
                    elif record.copy is not None and record.copy.alive:
                        record.copy.running = True
                        if record.copy.gated:
                            self.open_gate(node, record.copy)
                    return
                case TargetDecision.ASK_SOURCE:
                    said = self.ask(node, record)
                    if said in (Answer.COMMIT, Answer.ABORT):
                        self.decide(node, record, Outcome(said.value))
                    elif said is Answer.UNKNOWN and record.mark is not Mark.HELD:
                        self.decide(node, record, Outcome.ABORT)
                    else:
                        return
                case _:  # a copy that died before it ran is dropped too: the coordinator takes the resumption back
                    if record.mark not in (Mark.ACTIVATED, Mark.DISCARDED):
                        self.event(node, "drop the copy")
                        self.sweep(node, move)
                        self.put(node, record, Mark.DISCARDED)
                    return

    def state_of(self, node: str, move: str) -> CopyState:
        return target_answer(self.target_facts(self.journal[node, move]))
