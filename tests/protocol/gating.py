"""The model of the job's gates and of the communicator between its processes, as in `moves/nccl/`.

The rank and every peer's process are members of one communicator. Each member stores its number: 0 if it is destroyed, else
the number of the attempt that created it. Invariants: a gate opens only when the communicator is complete on every member,
and no gate stays closed for ever. A communicator that can never be complete is abandoned, which a node must have journalled
before: then the gates open, and its members get errors. No gate ever opens in front of a missing communicator otherwise.
"""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves.rules import CopyState, GateDecision, GateFacts, Mark, Outcome, gate_next, proof, proves
from tests.protocol.network import Broken, Copy
from tests.protocol.peering import Peering
from tests.protocol.world import LEASE_S, Answer, Lost, Record, Refused

SILENT_S, LOST_S = 240.0, 900.0


def gate_of(move: str) -> str:
    """The key of a node's record of its gates. The same node may also have a record as source, target or peer."""
    return f"{move} gate"


class Gating(Peering):
    """The nodes that have a member of the communicator. The source makes all of them destroy and recreate it."""

    def members(self) -> list[Copy]:
        return [copy for copy in (*self.copies, *self.programs.values()) if copy.alive and copy.running]

    def whole(self) -> bool:
        numbers = {copy.comm for copy in self.members()}
        return len(numbers) == 1 and 0 not in numbers

    def check(self) -> None:
        super().check()
        excused = any(self.excused(peer) for peer in self.peers) or self.given_up
        for copy in self.members():
            if not copy.gated and not excused and not self.whole():
                raise Broken(f"the gate on {copy.node} is open, and the communicator is not whole")
            if not copy.gated and not copy.comm and not copy.lost:
                raise Broken(f"the gate on {copy.node} is open in front of a missing communicator")
            if copy.lost and not any(record.abandoned for record in self.journal.values()):
                raise Broken(f"the communicator on {copy.node} is an error, and no node has abandoned it")

    def open_gate(self, node: str, copy: Copy, *, abandoned: bool) -> None:
        """The shim: refuses while the communicator is missing, unless it is abandoned."""
        if not copy.comm and not abandoned:
            raise Refused("the communicator is not attached: the gate stays closed")
        self.event(node, "open its gate")
        copy.gated, copy.lost = False, not copy.comm

    # ------------------------------------------------------------ requests of the driver

    def on_close(self, node: str, move: str, source: str, target: str, nonce: bytes) -> Answer:
        key = (node, gate_of(move))
        if key not in self.journal:
            member = self.programs.get(node)
            if member is None:
                at_source = self.journal.get((node, move))
                if at_source is None or at_source.copy is None:
                    raise Refused("no such rank here")
                member = at_source.copy
            if any(where == node and r.role == "gate" and not r.ended for (where, _), r in self.journal.items()):
                raise Refused("busy: the gates are closed for another move")
            self.event(node, "mark gated")
            record = Record("gate", source, Mark.GATED, nonce, copy=member, target=target)
            record.lease_until_s = self.now_s + LEASE_S  # until then the driver decides
            self.journal[key] = record
        record = self.still_closed(node, move)
        self.event(node, "close the gates")
        if record.copy is not None:
            record.copy.gated = True
        return Answer()

    def on_open(self, node: str, move: str, token: bytes) -> Answer:
        """From the driver. COMMIT is accepted; for ABORT, the source is asked whether it has restored the communicator."""
        return self.open_with(node, move, token, (Outcome.COMMIT,))

    def on_openagain(self, node: str, move: str, token: bytes, abandoned: bool) -> Answer:
        """From the source, which has restored the communicator, or abandoned it."""
        return self.open_with(node, move, token, tuple(Outcome), abandoned=abandoned)

    def open_with(
        self, node: str, move: str, token: bytes, believed: tuple[Outcome, ...], *, abandoned: bool = False
    ) -> Answer:
        record = self.journal.get((node, gate_of(move)))
        if record is not None and not record.ended:
            outcome = next((item for item in Outcome if proves(token, record.nonce, item, move)), None)
            if outcome is None:
                raise Refused("not a token for this move")
            if outcome in believed:
                self.event(node, f"learn {outcome}")
                record.outcome, record.abandoned = record.outcome or outcome, record.abandoned or abandoned
            record.lease_until_s = -1.0  # the driver no longer works on this move
            self.settle_gate(node, gate_of(move))
        return Answer()

    # ------------------------------------------------------------ requests of the source

    def still_closed(self, node: str, move: str) -> Record:
        record = self.journal.get((node, gate_of(move)))
        if record is None or record.outcome or record.ended:
            raise Refused("no gate is closed here for this move")
        return record

    def on_takedown(self, node: str, move: str) -> Answer:
        self.change(node, self.still_closed(node, move).copy, 0)
        return Answer()

    def on_build(self, node: str, move: str, number: int) -> Answer:
        held = self.journal.get((node, move))
        if held is not None and held.role == "target":
            if held.mark is not Mark.HELD or held.outcome or not held.copy_exists:
                raise Refused("no copy is held here")
            self.change(node, held.copy, number)
        else:
            self.change(node, self.still_closed(node, move).copy, number)
        return Answer()

    def change(self, node: str, copy: Copy | None, number: int) -> None:
        if copy is None or not copy.alive:
            raise Refused("it has ended")
        self.event(node, "build the communicator" if number else "take the communicator down")
        if not copy.gated:
            raise Broken(f"the communicator on {node} is changed behind an open gate")
        if number and copy.comm:
            return  # the shim does not recreate a communicator that was not destroyed
        if number and number <= self.attempts:
            raise Refused("the others build another one by now")
        copy.comm, copy.lost = number, False

    def take_down(self, node: str, move: str, record: Record) -> None:
        self.change(node, record.copy, 0)
        for peer in record.detached_on:
            self.call(node, peer, "TakeDown", move)

    def build(self, node: str, move: str, record: Record, on: str) -> None:
        self.attempts += 1
        number = self.attempts + 1
        if on == node:
            self.change(node, record.copy, number)
        else:
            self.call(node, on, "Build", move, number)
        for peer in record.detached_on:
            self.call(node, peer, "Build", move, number)

    # ------------------------------------------------------------ undo, with or without a driver

    def put_back(self, node: str, move: str, record: Record) -> None:
        """Restores the communicator after ABORT, when the rank runs here again with its gate closed."""
        if not record.detached or record.abandoned:
            return
        if not record.copy_exists:
            self.abandon(node, move, record)
            return
        try:
            self.take_down(node, move, record)
            self.build(node, move, record, node)
        except Refused:  # a member has ended, or has opened its gate
            self.abandon(node, move, record)

    def abandon(self, node: str, move: str, record: Record) -> None:
        """Members that answer have theirs taken down first: one that was built with the target's copy would hang."""
        with suppress(Refused):
            self.change(node, record.copy, 0)
        for peer in record.detached_on:
            with suppress(Lost, Refused):
                self.call(node, peer, "TakeDown", move)
        self.event(node, "abandon the communicator")
        record.abandoned = self.given_up = True

    def on_declarememberdead(self, node: str, move: str, member: str) -> Answer:
        record = self.journal.get((node, move))
        if record is None or record.role != "source":
            raise Refused("no such move")
        lone = record.holds is None and self.now_s > record.lease_until_s and not record.copy_exists
        undone = record.holds is Outcome.ABORT or lone
        if not undone or member not in record.detached_on:
            raise Refused(f"it does not wait for {member}")
        if self.reaches(node, member):
            raise Refused(f"{member} lives")
        if not record.ended and record.mark is not Mark.SETTLED:
            self.abandon(node, move, record)
            self.look(node, move)
        return Answer()

    def open_all(self, node: str, move: str, record: Record) -> None:
        if record.holds is None or (node, gate_of(move)) not in self.journal:
            return
        if record.copy is not None and record.copy.gated:  # the gate's record may have ended with COMMIT
            self.open_gate(node, record.copy, abandoned=record.abandoned)
        token = proof(record.nonce, record.holds, move)
        for one in (node, *record.detached_on):
            with suppress(Lost, Refused):
                self.call(node, one, "OpenAgain", move, token, record.abandoned)

    # ------------------------------------------------------------ settling, by the rules alone

    def settle_gate(self, node: str, key: str) -> None:
        record, asked = self.journal[node, key], False
        facts = GateFacts(record.mark, record.outcome)
        while not record.ended:
            decision, _ = gate_next(facts)
            match decision:
                case GateDecision.ASK:
                    if asked or self.now_s <= record.lease_until_s:
                        return
                    asked, facts = True, self.ask_for_gate(node, key.removesuffix(" gate"), record)
                    continue
                case GateDecision.LEARN_COMMIT | GateDecision.LEARN_ABORT:
                    outcome = Outcome.COMMIT if decision is GateDecision.LEARN_COMMIT else Outcome.ABORT
                    self.event(node, f"learn {outcome}")
                    record.outcome, record.abandoned = outcome, record.abandoned or facts.abandoned
                case GateDecision.OPEN:
                    self.event(node, "open the gates")
                    left = record.outcome is Outcome.COMMIT and node == record.peer
                    if record.copy is not None and record.copy.alive and not left:
                        self.open_here(node, key.removesuffix(" gate"), record, record.copy)
                    self.mark(node, record, Mark.SETTLED)
                case GateDecision.CLOSE:
                    self.end(node, record)
            facts = GateFacts(record.mark, record.outcome)

    def open_here(self, node: str, move: str, record: Record, copy: Copy) -> None:
        """If the shim refuses, source and target are asked whether the communicator is abandoned; the next attempt succeeds
        then."""
        try:
            self.open_gate(node, copy, abandoned=record.abandoned)
        except Refused:
            record.abandoned = record.abandoned or self.ask_for_gate(node, move, record).abandoned
            raise

    def ask_for_gate(self, node: str, move: str, record: Record) -> GateFacts:
        outcome: Outcome | None = None
        undone = unknowing = abandoned = False
        silent_s = 0.0
        down = record.copy is not None and record.copy.alive and record.copy.comm == 0
        try:
            answer = self.call(node, record.peer, "GetOutcome", move)
            if answer.kind == "UNDECIDED":
                return GateFacts(record.mark, None)
            unknowing = answer.kind == "NOT FOUND"
            outcome = None if unknowing else Outcome(answer.kind)
            undone = outcome is Outcome.ABORT and answer.settled
            abandoned = answer.abandoned
            if outcome is Outcome.COMMIT and answer.copy is CopyState.RUNNING and (abandoned or not down):
                return GateFacts(record.mark, None, outcome, target=CopyState.RUNNING, abandoned=abandoned)
        except Lost:
            silent_s = self.now_s - record.lease_until_s
        target = CopyState.UNREACHABLE
        if outcome is not Outcome.ABORT:
            with suppress(Lost):
                said = self.call(node, record.target, "GetCopy", move)
                target, abandoned = said.copy, abandoned or said.abandoned
        silent, lost = silent_s > SILENT_S, silent_s > LOST_S
        return GateFacts(record.mark, None, outcome, undone, unknowing, silent, target, lost, down, abandoned)
