"""The model of the daemons on source and target: it serves the requests of a move as `snapshotd/moves/` does.

A handler only checks whether its step is allowed in the present state; handlers are idempotent. Each mark is journalled as
`Mark` describes, the outcome once. `mover.py` executes `migrator/protocol.py` on the model.
"""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves.rules import CopyState, Mark, Outcome, TargetFacts, proof, proves, target_answer
from tests.protocol.gating import gate_of
from tests.protocol.network import Copy, Socket
from tests.protocol.settling import Settling
from tests.protocol.world import LEASE_S, PERSON, Answer, Lost, Record, Refused


class Model(Settling):
    """All participants together."""

    def serve(self, node: str, rpc: str, args: tuple[object, ...]) -> Answer:
        self.mind_keeper(node)
        answer: Answer = getattr(self, f"on_{rpc.lower()}")(node, *args)
        return answer

    # ------------------------------------------------------------ the source's requests

    def undecided(self, node: str, move: str, *marks: Mark) -> Record:
        """The record of a move that may still proceed. Every request of the driver renews the lease."""
        record = self.journal.get((node, move))
        if record is None or record.outcome or record.ended or record.mark not in marks:
            raise Refused(f"{move} on {node} does not allow it")
        if record.role == "source" and self.source_facts(record, node).interrupted:
            raise Refused(f"{move} on {node} was interrupted")
        record.lease_until_s = self.now_s + LEASE_S
        return record

    def on_inspect(self, node: str, move: str) -> Answer:
        copy = next((copy for copy in self.copies if copy.node == node and copy.alive and copy.running), None)
        if copy is None:
            raise Refused("no such rank here")
        return Answer(peers=connected(copy))

    def on_begin(self, node: str, move: str, target: str, nonce: bytes) -> Answer:
        if (node, move) in self.journal:
            self.undecided(node, move, Mark.BEGUN)
            return Answer()
        self.on_inspect(node, move)
        if any(where == node and r.role != "gate" and not r.ended for (where, _), r in self.journal.items()):
            raise Refused("busy: an earlier move of this rank is not settled")
        copy = next(copy for copy in self.copies if copy.node == node and copy.alive and copy.running)
        self.event(node, "mark begun")
        record = Record("source", target, Mark.BEGUN, nonce, copy=copy, marked_in_life=self.life[node])
        record.lease_until_s = self.now_s + LEASE_S
        self.journal[node, move] = record
        return Answer()

    def on_preparedevice(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.BEGUN)
        self.mark(node, record, Mark.BEGUN)  # now with the files that receive device memory
        return Answer()

    def on_detach(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.BEGUN)
        if record.copy is not None and not record.detached:
            self.still_closed(node, move)
            self.event(node, "note the members")
            record.detached = True
            record.detached_on = tuple(peer for peer in self.peers if (peer, gate_of(move)) in self.journal)
        try:
            self.take_down(node, move, record)
        except Lost as lost:
            raise Refused("a member does not answer") from lost
        return Answer()

    def on_attach(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.STREAMED)
        try:
            self.build(node, move, record, record.peer)
        except Lost as lost:
            raise Refused("a member does not answer") from lost
        return Answer()

    def on_freeze(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.BEGUN, Mark.FROZEN)
        if record.mark is Mark.BEGUN:
            self.mark(node, record, Mark.FREEZING)
            self.event(node, "stop and freeze")
            if record.copy is not None:
                record.copy.running = False
            if record.copy is not None and connected(record.copy):
                self.mark(node, record, Mark.FREEZING)  # now with the connections, before they are filtered
                record.rewires = connected(record.copy)
                self.event(node, "filter")
                for peer in record.rewires:
                    self.hold(node, move, peer, node)
            self.mark(node, record, Mark.FROZEN)
        return Answer(peers=record.rewires)

    def on_stream(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.FROZEN, Mark.STREAMED)
        if record.mark is Mark.FROZEN:
            try:
                self.call(node, record.peer, "Push", move)
                if record.copy is None or not record.copy.alive:
                    raise Refused("the rank is dead")
                self.run_criu(node, "criu dump", record.copy)
                if not record.copy_exists:
                    raise Refused("the rank died under criu")
                self.call(node, record.peer, "Seal", move)
            except Lost as lost:
                raise Refused("the target does not answer") from lost
            self.mark(node, record, Mark.STREAMED)
        return Answer()

    def on_commit(self, node: str, move: str, receipt: bytes) -> Answer:
        record = self.journal.get((node, move))
        if record is None or not proves(receipt, record.nonce, "HELD", move):
            raise Refused("no receipt of a held copy")
        if record.outcome is None:
            self.record_outcome(node, record, Outcome.COMMIT)
        return self.on_getoutcome(node, move)

    def on_abort(self, node: str, move: str) -> Answer:
        """Abort ends the driver's lease. If the copy is gone, the rules still decide the outcome."""
        if (node, move) not in self.journal:
            self.event(node, "record ABORT")  # for a Begin that arrives later
            self.journal[node, move] = Record("source", "", Mark.SETTLED, outcome=Outcome.ABORT, ended=True)
        record = self.journal[node, move]
        if not record.ended:
            if record.outcome is None:
                record.lease_until_s = -1.0
            with suppress(Lost, Refused):
                self.settle_source(node, move)
        return self.outcome_of(record, move)

    def on_release(self, node: str, move: str) -> Answer:
        if not self.journal[node, move].ended:
            self.settle_source(node, move)
        return Answer("released" if self.journal[node, move].ended else "waits")

    def on_getoutcome(self, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        if record is None or not record.nonce:
            return Answer("NOT FOUND")  # also if it was aborted before Begin: without a nonce there is no token
        return self.outcome_of(record, move)

    def outcome_of(self, record: Record, move: str) -> Answer:
        if record.holds is None:
            return Answer("UNDECIDED")
        released = record.holds is Outcome.COMMIT and record.mark is Mark.SETTLED
        copy = CopyState.RUNNING if released else CopyState.UNREACHABLE
        settled = record.mark is Mark.SETTLED
        token = proof(record.nonce, record.holds, move)
        return Answer(record.holds, token, copy, settled=settled, abandoned=record.abandoned)

    def on_declaretargetdead(self, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        if record is None:
            raise Refused("no such move")
        try:
            state = self.call(node, record.peer, "GetCopy", move).copy
        except Lost:
            state = CopyState.UNREACHABLE
        if state in (CopyState.HELD, CopyState.RUNNING, CopyState.ENDED):
            raise Refused("the target lives and has the rank")
        self.event(node, "record the declaration of a person")
        record.overruled_by = PERSON
        record.outcome = record.outcome or Outcome.ABORT
        target = self.journal.get((record.peer, move))
        if target is not None and target.mark is Mark.ACTIVATED:
            self.severed |= set(self.peers)  # the peers may have communicated with the copy that ran there
        self.settle_source(node, move)
        return self.on_getoutcome(node, move)

    # ------------------------------------------------------------ the target's requests

    def run_criu(self, node: str, what: str, copy: Copy) -> None:
        """If criu, or the daemon that waits for it, is killed, the sockets stay in repair mode."""
        for socket in copy.sockets.values():
            socket.repair = True
        self.event(node, what)
        killed, self.criu_killed = self.criu_killed, False
        if killed:
            raise Refused(f"{what} failed")
        for socket in copy.sockets.values():
            socket.repair = False

    def on_examine(self, node: str, move: str) -> Answer:
        return Answer()

    def on_prepare(self, node: str, move: str, source: str) -> Answer:
        if (node, move) not in self.journal:
            self.event(node, "mark prepared")
            record = Record("target", source, Mark.PREPARED, f"nonce of {move}".encode())
            record.lease_until_s = self.now_s + LEASE_S  # until then it does not ask the source
            self.journal[node, move] = record
        return Answer(token=self.undecided(node, move, Mark.PREPARED).nonce)

    def on_push(self, node: str, move: str) -> Answer:
        self.undecided(node, move, Mark.PREPARED)
        self.images.add((node, move))
        return Answer()

    def on_seal(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.PREPARED, Mark.SEALED)
        if (node, move) not in self.images:
            raise Refused("the image is gone")
        self.mark(node, record, Mark.SEALED)
        return Answer()

    def on_restore(self, node: str, move: str) -> Answer:
        record = self.undecided(node, move, Mark.SEALED, Mark.HELD)
        if record.mark is Mark.SEALED:
            if (node, move) not in self.images:
                raise Refused("the image is gone")
            self.mark(node, record, Mark.RESTORING)
            record.rewires = self.journal[record.peer, move].rewires  # in reality, from the image
            if record.rewires:
                self.event(node, "filter")
            for peer in record.rewires:
                self.hold(node, move, peer, node)
            sockets = {peer: Socket(peer) for peer in record.rewires}
            # Stopped from the first instruction on, and perhaps incomplete. Its gate is closed, as in the dump.
            record.copy = Copy(node, move, sockets=sockets, gated=True, comm=0)
            self.copies.append(record.copy)
            self.run_criu(node, "criu restore", record.copy)
            self.mark(node, record, Mark.HELD)
        if not record.copy_exists:
            raise Refused("the restored copy is gone")
        return Answer(token=proof(record.nonce, "HELD", move))

    def on_activate(self, node: str, move: str, token: bytes, abandoned: bool = False) -> Answer:
        record = self.journal.get((node, move))
        if record is None or not proves(token, record.nonce, Outcome.COMMIT, move):
            raise Refused("not a token for this move")
        record.abandoned = record.abandoned or abandoned
        self.learn(record, Outcome.COMMIT)
        self.settle_target(node, move)
        return self.on_getcopy(node, move)

    def on_discard(self, node: str, move: str, token: bytes) -> Answer:
        record = self.journal.get((node, move))
        if record is not None:
            if not proves(token, record.nonce, Outcome.ABORT, move):
                raise Refused("not a token for this move")
            self.learn(record, Outcome.ABORT)
            self.settle_target(node, move)
        return self.on_getcopy(node, move)

    def learn(self, record: Record, outcome: Outcome) -> None:
        record.outcome = record.outcome or outcome
        if record.outcome is not outcome:
            raise Refused(f"it has already ended here with {record.outcome}")

    def on_getcopy(self, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        if record is None:
            return Answer(copy=CopyState.NO_SUCH_MOVE)
        state = target_answer(TargetFacts(record.mark, record.outcome, record.copy_exists))
        if state is CopyState.GONE and (node, move) in self.locked:
            raise Lost("it is perhaps just being let go: what it is can be said when that is over")
        if state in (CopyState.GONE, CopyState.DISCARDED):
            self.said_dead.add((node, move))
        return Answer(copy=state, abandoned=record.abandoned)

    def on_declaresourcedead(self, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        if record is None:
            raise Refused("no such move")
        if record.mark is not Mark.HELD or not record.copy_exists or record.outcome is Outcome.ABORT:
            raise Refused("no held copy here")
        if self.reaches(node, record.peer):
            raise Refused("the source lives: it decides")
        self.event(node, "record the declaration of a person")
        record.overruled_by, record.outcome, record.abandoned = PERSON, Outcome.COMMIT, True
        self.sever_unpointed(move)
        self.give_up_unbuilt(move, node)
        self.settle_target(node, move)
        return self.on_getcopy(node, move)


def connected(copy: Copy) -> tuple[str, ...]:
    """The peers of the copy's connections, except those that it knows to be lost."""
    return tuple(peer for peer, socket in copy.sockets.items() if not socket.lost)
