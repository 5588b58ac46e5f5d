"""How the model's daemons settle unfinished moves: collect facts, call `snapshotd.moves.rules`, carry out its decisions.

Nothing is decided here. `model.py` adds the requests.
"""

from __future__ import annotations

from snapshotd.moves.rules import (
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
from tests.protocol.gating import Gating
from tests.protocol.network import HOME, Broken
from tests.protocol.world import TARGET, Record, Refused


class Settling(Gating):
    """Daemons without a driver. A node is the source or the target of a move, never both."""

    def look(self, node: str, move: str) -> None:
        if not move:
            self.mind_keeper(node)
        elif self.journal[node, move].role == "source":
            if (node, move) not in self.locked:
                with self.at_work(node, move):
                    self.settle_source(node, move)
        elif self.journal[node, move].role == "gate":
            if (node, move) not in self.locked:
                with self.at_work(node, move):
                    self.settle_gate(node, move)
        elif self.journal[node, move].role == "peer":
            if (node, move) not in self.locked:
                with self.at_work(node, move):
                    self.settle_peer(node, move)
        else:
            self.settle_target(node, move)

    def mind_keeper(self, node: str) -> None:
        """When the home keeper is killed, its rank ends. ABORT is recorded first, so that no COMMIT can follow."""
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

    def record_outcome(self, node: str, record: Record, outcome: Outcome) -> None:
        self.event(node, f"record {outcome}")
        if record.outcome is None:
            record.outcome = outcome

    # ------------------------------------------------------------ settling, by the rules alone

    def source_facts(self, record: Record, node: str, target: CopyState = CopyState.UNREACHABLE) -> SourceFacts:
        interrupted = record.mark in (Mark.FREEZING, Mark.FROZEN) and record.marked_in_life != self.life[node]
        lease_over = self.now_s > record.lease_until_s
        restarted = record.mark is Mark.STREAMED and record.marked_in_life != self.life[node]
        return SourceFacts(record.mark, record.holds, record.copy_exists, lease_over, interrupted, target, restarted)

    def settle_source(self, node: str, move: str) -> str:
        """Acts until the source can only wait. Returns what it waits for."""
        record, target = self.journal[node, move], CopyState.UNREACHABLE
        while True:
            decision, reason = source_next(self.source_facts(record, node, target))
            match decision:
                case SourceDecision.ASK_TARGET:
                    if target is not CopyState.UNREACHABLE:
                        return reason  # the target has answered; ask again in a later round
                    target = self.call(node, record.peer, "GetCopy", move).copy
                case SourceDecision.RECORD_COMMIT:
                    if target is CopyState.HELD:
                        self.attach_late(node, move, record)
                    self.record_outcome(node, record, Outcome.COMMIT)
                    self.sever_unpointed(move)
                case SourceDecision.RECORD_ABORT:
                    self.record_outcome(node, record, Outcome.ABORT)
                case SourceDecision.HAND_TOKEN:
                    token = proof(record.nonce, Outcome.COMMIT, move)
                    self.call(node, record.peer, "Activate", move, token, record.abandoned)
                    target = CopyState.UNREACHABLE
                case SourceDecision.TAKE_BACK:
                    self.event(node, "record the report of the target")
                    record.overruled_by = TARGET
                case SourceDecision.THAW:
                    with self.at_work(node, move):
                        self.let_go(node, move, record)
                        self.put_back(node, move, record)
                        self.mark(node, record, Mark.SETTLED)
                        self.open_all(node, move, record)
                case SourceDecision.RELEASE:
                    self.drop_copy(node, move, record, decision)
                    self.mark(node, record, Mark.SETTLED)
                case SourceDecision.CLOSE:
                    if record.mark is not Mark.SETTLED:
                        self.let_packets_go(node, move, record)
                        self.put_back(node, move, record)
                        self.mark(node, record, Mark.SETTLED)
                        self.open_all(node, move, record)
                    self.end(node, record)
                    return reason
                case _:
                    return reason

    def attach_late(self, node: str, move: str, record: Record) -> None:
        """The driver may not have come to Attach: builds it with the target's copy, unless a member has ended."""
        if record.detached and not record.abandoned:
            try:
                self.build(node, move, record, record.peer)
            except Refused:
                self.abandon(node, move, record)
        self.give_up_unbuilt(move, record.peer)

    def give_up_unbuilt(self, move: str, target: str) -> None:
        """The held copy is about to run. If the communicator is not whole with it, the job gets NCCL's own errors."""
        held = self.journal[target, move].copy
        members = [*([held] if held is not None else []), *self.programs.values()]
        numbers = {copy.comm for copy in members if copy.alive}
        self.given_up = self.given_up or len(numbers) != 1 or 0 in numbers

    def sever_unpointed(self, move: str) -> None:
        """The target's copy runs without a driver, so peers that have not filtered their ends yet do not re-point them."""
        self.severed |= {peer for peer in self.peers if (peer, move) not in {entry[:2] for entry in self.filters}}

    def let_go(self, node: str, move: str, record: Record) -> None:
        """Thaws the source's copy, or kills it if its home keeper is known to be dead."""
        for socket in record.copy.sockets.values() if record.copy is not None else ():
            socket.repair = False  # a killed criu may have left it in repair mode
        self.let_packets_go(node, move, record)
        self.event(node, "kill what has no keeper" if self.knows_the_keeper_is_dead(node) else "thaw")
        if record.copy is not None and record.copy.alive:
            record.copy.alive = record.copy.running = not self.knows_the_keeper_is_dead(node)

    def drop_copy(self, node: str, move: str, record: Record, why: str) -> None:
        """Puts the sockets in repair mode, kills the copy, and only then removes the filters."""
        self.event(node, f"{why}: silence")
        for socket in record.copy.sockets.values() if record.copy is not None else ():
            socket.repair = True
        self.event(node, why)
        if record.copy is not None:
            self.kill_silently(record.copy)
        self.let_packets_go(node, move, record)

    def let_packets_go(self, node: str, move: str, record: Record) -> None:
        """Removes the filters, once the rank's sockets here are intact in a copy that may run, or closed without a packet."""
        if not record.rewires:
            return
        self.event(node, "let packets go")
        if record.copy_exists and record.copy is not None:
            own = Outcome.ABORT if record.role == "source" else Outcome.COMMIT
            if self.decided(move) is not own or any(socket.repair for socket in record.copy.sockets.values()):
                raise Broken(f"{node} lets packets of a copy go that may not run")
        self.drop_filters(node, move)

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
                        self.let_packets_go(node, move, record)
                        self.event(node, "let go")
                        if record.copy is not None and record.copy.alive:
                            record.copy.running = True
                        if record.copy is not None and record.copy.gated:
                            self.open_gate(node, record.copy, abandoned=record.abandoned)
                    self.images.discard((node, move))
                    self.end(node, record)
                case TargetDecision.CLOSE if record.mark in (Mark.ACTIVATED, Mark.DISCARDED):
                    self.images.discard((node, move))  # the daemon may have died before it removed it
                    self.let_packets_go(node, move, record)
                    self.end(node, record)
                case TargetDecision.DISCARD | TargetDecision.CLOSE:
                    self.drop_copy(node, move, record, "discard")
                    self.images.discard((node, move))
                    self.mark(node, record, Mark.DISCARDED)

    def ask_source(self, node: str, move: str, record: Record) -> bool:
        """Whether the source has answered with an outcome. It counts only with the token that proves it."""
        if record.mark is Mark.PREPARED and self.now_s <= record.lease_until_s:
            return False  # the driver may be on its way to Begin
        answer = self.call(node, record.peer, "GetOutcome", move)
        if answer.kind == "NOT FOUND" and record.mark not in (Mark.HELD, Mark.ACTIVATED):
            record.outcome = Outcome.ABORT  # never begun, and no receipt for COMMIT can be issued any more
        elif answer.kind in ("NOT FOUND", "UNDECIDED") or not proves(answer.token, record.nonce, answer.kind, move):
            return False
        else:
            record.outcome, record.abandoned = Outcome(answer.kind), record.abandoned or answer.abandoned
        return True
