"""How the model's daemons settle unfinished moves: gather facts, ask `snapshotd.rules`, carry out what it says.

Nothing here decides. `model.py` adds the requests.
"""

from __future__ import annotations

from snapshotd.rules import (
    CopyState,
    Mark,
    Outcome,
    SourceDecision,
    SourceFacts,
    TargetDecision,
    TargetFacts,
    proof,
    proves,
    source_next,
    target_next,
)
from tests.protocol.world import HOME, TARGET, Copy, Record, World


class Settling(World):
    """Two daemons that are left alone. A node is the source or the target of a move, never both."""

    def look(self, node: str, move: str) -> None:
        if not move:
            self.mind_keeper(node)
        elif self.journal[node, move].role == "source":
            if (node, move) not in self.locked:
                with self.at_work(node, move):
                    self.settle_source(node, move)
        else:
            self.settle_target(node, move)

    def mind_keeper(self, node: str) -> None:
        """A killed home keeper takes its rank with it. The order matters: no COMMIT may follow."""
        if not self.knows_the_keeper_is_dead(node):
            return
        records = [record for (where, _), record in self.journal.items() if where == node]
        undecided = [record for record in records if record.role == "source" and record.outcome is None]
        for record in undecided:
            self.record_outcome(node, record, Outcome.ABORT)
        for copy in self.copies:
            if copy.node == node and (copy.running or any(r.copy is copy for r in undecided)):
                copy.alive = False

    def knows_the_keeper_is_dead(self, node: str) -> bool:
        return self.keeper_killed and (node == HOME or self.reaches(node, HOME))

    # ------------------------------------------------------------ writing to the journal

    def mark(self, node: str, record: Record, mark: Mark) -> None:
        self.event(node, f"mark {mark}")
        record.mark, record.marked_in_life = mark, self.life[node]

    def record_outcome(self, node: str, record: Record, outcome: Outcome) -> None:
        self.event(node, f"record {outcome}")
        if record.outcome is None:
            record.outcome = outcome

    def end(self, node: str, record: Record) -> None:
        self.event(node, "close")
        record.ended = True

    # ------------------------------------------------------------ settling, by the rules alone

    def source_facts(self, record: Record, node: str, target: CopyState = CopyState.UNREACHABLE) -> SourceFacts:
        interrupted = record.mark in (Mark.FREEZING, Mark.FROZEN) and record.marked_in_life != self.life[node]
        lease_over = self.now_s > record.lease_until_s
        return SourceFacts(record.mark, record.holds, record.copy_exists, lease_over, interrupted, target)

    def settle_source(self, node: str, move: str) -> str:
        """Act until there is nothing to do but wait; say what for."""
        record, target = self.journal[node, move], CopyState.UNREACHABLE
        while True:
            decision, reason = source_next(self.source_facts(record, node, target))
            match decision:
                case SourceDecision.ASK_TARGET:
                    if target is not CopyState.UNREACHABLE:
                        return reason  # it has answered; ask again another time
                    target = self.call(node, record.peer, "GetCopy", move).copy
                case SourceDecision.RECORD_COMMIT:
                    self.record_outcome(node, record, Outcome.COMMIT)
                case SourceDecision.RECORD_ABORT:
                    self.record_outcome(node, record, Outcome.ABORT)
                case SourceDecision.HAND_TOKEN:
                    self.call(node, record.peer, "Activate", move, proof(record.nonce, Outcome.COMMIT, move))
                    target = CopyState.UNREACHABLE
                case SourceDecision.TAKE_BACK:
                    self.event(node, "write down the word of the target")
                    record.word = TARGET
                case SourceDecision.THAW:
                    self.let_go(node, record.copy)
                    self.mark(node, record, Mark.SETTLED)
                case SourceDecision.RELEASE:
                    self.drop_copy(node, record, decision)
                    self.mark(node, record, Mark.SETTLED)
                case SourceDecision.CLOSE:
                    self.end(node, record)
                    return reason
                case _:
                    return reason

    def let_go(self, node: str, copy: Copy | None) -> None:
        """The source's copy goes on; where its home keeper is known to be dead it is killed, not thawed."""
        self.event(node, "kill what nobody keeps" if self.knows_the_keeper_is_dead(node) else "thaw")
        if copy is not None and copy.alive:
            copy.alive = copy.running = not self.knows_the_keeper_is_dead(node)

    def drop_copy(self, node: str, record: Record, why: str) -> None:
        self.event(node, why)
        if record.copy is not None:
            record.copy.alive = record.copy.running = False

    def settle_target(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        while not record.ended:
            match target_next(TargetFacts(record.mark, record.outcome, record.copy_exists))[0]:
                case TargetDecision.ASK_SOURCE:
                    if not self.ask_source(node, move, record):
                        return
                case TargetDecision.ACTIVATE:
                    with self.at_work(node, move):
                        if record.mark is not Mark.ACTIVATED:
                            self.mark(node, record, Mark.ACTIVATED)
                        self.event(node, "let go")
                        if record.copy is not None and record.copy.alive:
                            record.copy.running = True
                    self.images.discard((node, move))
                    self.end(node, record)
                case TargetDecision.CLOSE if record.mark in (Mark.ACTIVATED, Mark.DISCARDED):
                    self.images.discard((node, move))  # the daemon may have died before it could drop it
                    self.end(node, record)
                case TargetDecision.DISCARD | TargetDecision.CLOSE:
                    self.drop_copy(node, record, "discard")
                    self.images.discard((node, move))
                    self.mark(node, record, Mark.DISCARDED)

    def ask_source(self, node: str, move: str, record: Record) -> bool:
        """Whether the source has said how the move ends. An outcome counts only with the token that proves it."""
        if record.mark is Mark.PREPARED and self.now_s <= record.lease_until_s:
            return False  # the driver may be on its way to Begin
        answer = self.call(node, record.peer, "GetOutcome", move)
        if answer.kind == "NOT FOUND" and record.mark not in (Mark.HELD, Mark.ACTIVATED):
            record.outcome = Outcome.ABORT  # never begun, and a receipt for COMMIT can no longer be given
        elif answer.kind in ("NOT FOUND", "UNDECIDED") or not proves(answer.token, record.nonce, answer.kind, move):
            return False
        else:
            record.outcome = Outcome(answer.kind)
        return True
