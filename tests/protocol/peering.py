"""The model of the peers' daemons: they pass facts to `snapshotd.moves.rules.peer_next` and carry out its decisions.

As in `moves/peers/steps.py`, a socket is changed only while its process is stopped, with filters for its old and its new
address. Each of these actions is a separate event.
"""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves.rules import CopyState, Mark, Outcome, PeerDecision, PeerFacts, peer_next, proves
from tests.protocol.network import Broken
from tests.protocol.world import LEASE_S, Answer, Lost, Record, Refused, World

#: Without an answer of source and target for this long, a peer gives up waiting.
LOST_S = 900.0


class Peering(World):
    """The nodes that have the peer socket of a connection."""

    def has_end(self, node: str, names: str) -> bool:
        program = self.programs[node]
        socket = program.sockets[node]
        return program.alive and not socket.lost and not socket.repair and socket.names == names

    # ------------------------------------------------------------ requests

    def on_inspectconnections(self, node: str, move: str, source: str) -> Answer:
        if not self.has_end(node, source):
            raise Refused("the other end is in no process here")
        return Answer()

    def begun(self, node: str, move: str, source: str, target: str, nonce: bytes) -> Record:
        if (node, move) not in self.journal:
            if any(where == node and r.role != "gate" and not r.ended for (where, _), r in self.journal.items()):
                raise Refused("busy: an earlier move of this rank is not settled here")
            self.event(node, "mark begun")
            record = Record("peer", source, Mark.PREPARED, nonce, target=target)
            record.lease_until_s = self.now_s + LEASE_S
            self.journal[node, move] = record
        record = self.journal[node, move]
        if record.outcome or record.ended:
            raise Refused("it has ended")
        return record

    def on_suspendtimeouts(self, node: str, move: str, source: str, target: str, nonce: bytes) -> Answer:
        record = self.begun(node, move, source, target, nonce)
        if record.mark is Mark.PREPARED:
            self.mark(node, record, Mark.TIMEOUTS_SUSPENDED)
            self.event(node, "suspend timeouts")
            self.programs[node].sockets[node].timeouts_suspended = True
        return Answer()

    def on_hold(self, node: str, move: str, source: str, target: str, nonce: bytes) -> Answer:
        record = self.begun(node, move, source, target, nonce)
        if record.mark not in (Mark.REPOINTING, Mark.REPOINTED) and self.has_end(node, source):
            with self.at_work(node, move):
                self.mark(node, record, Mark.FILTERED)
                self.programs[node].sockets[node].timeouts_suspended = True
                self.event(node, "filter")
                self.hold(node, move, node, source, target)
        return Answer()

    def on_repoint(self, node: str, move: str, source: str, target: str, nonce: bytes) -> Answer:
        record = self.begun(node, move, source, target, nonce)
        if record.mark is not Mark.REPOINTED:
            self.on_inspectconnections(node, move, source)
            with self.at_work(node, move):
                self.mark(node, record, Mark.REPOINTING)
                self.programs[node].sockets[node].timeouts_suspended = True
                self.bring(node, move, target)
                self.mark(node, record, Mark.REPOINTED)
        return Answer()

    def on_settle(self, node: str, move: str, token: bytes) -> Answer:
        record = self.journal.get((node, move))
        if record is not None:
            outcome = next((item for item in Outcome if proves(token, record.nonce, item, move)), None)
            if outcome is None:
                raise Refused("not a token for this move")
            self.event(node, f"learn {outcome}")
            record.outcome = record.outcome or outcome
            self.settle_peer(node, move)
        return Answer()

    # ------------------------------------------------------------ settling, by the rules alone

    def settle_peer(self, node: str, move: str) -> None:
        record, asked = self.journal[node, move], False
        said: tuple[Outcome | None, CopyState, bool, bool] = None, CopyState.UNREACHABLE, False, False
        while not record.ended:
            interrupted = record.mark is Mark.REPOINTING and record.marked_in_life != self.life[node]
            decision, _ = peer_next(PeerFacts(record.mark, record.outcome, interrupted, *said))
            match decision:
                case PeerDecision.ASK:
                    if asked:
                        return
                    asked, said = True, self.ask_both(node, move, record)
                case PeerDecision.LEARN_COMMIT | PeerDecision.LEARN_ABORT:
                    outcome = Outcome.COMMIT if decision is PeerDecision.LEARN_COMMIT else Outcome.ABORT
                    self.event(node, f"learn {outcome}")
                    record.outcome = outcome
                    if said[3]:
                        self.severed.add(node)  # given up: the connection lives only if the rank is where it was
                case PeerDecision.MEND:
                    self.bring(node, move, record.peer)
                    record.marked_in_life = self.life[node]  # kept in the daemon's memory only, not as a mark
                case PeerDecision.FINISH:
                    self.bring(node, move, record.target)
                    self.mark(node, record, Mark.REPOINTED)
                case PeerDecision.POINT_BACK:
                    self.bring(node, move, record.peer)
                    self.mark(node, record, Mark.POINTED_BACK)
                case PeerDecision.UNFILTER:
                    self.event(node, "let packets go")
                    self.check_end(node, move, record)
                    self.drop_filters(node, move)
                    self.programs[node].sockets[node].timeouts_suspended = False
                    self.mark(node, record, Mark.SETTLED)
                case PeerDecision.CLOSE:
                    if record.mark is not Mark.SETTLED:
                        self.programs[node].sockets[node].timeouts_suspended = False
                        self.mark(node, record, Mark.SETTLED)
                    self.end(node, record)

    def ask_both(self, node: str, move: str, record: Record) -> tuple[Outcome | None, CopyState, bool, bool]:
        outcome, lost = None, False
        try:
            answer = self.call(node, record.peer, "GetOutcome", move)
            record.lease_until_s = self.now_s + LEASE_S
            if answer.kind in ("UNDECIDED", "ABORT"):
                return Outcome.ABORT if answer.kind == "ABORT" else None, CopyState.UNREACHABLE, False, False
            outcome = Outcome.COMMIT if answer.kind == "COMMIT" else None
            if outcome and answer.copy is CopyState.RUNNING:
                return outcome, CopyState.RUNNING, False, False  # the source has released its copy
        except Lost:
            lost = self.now_s - record.lease_until_s > LOST_S
        with suppress(Lost):
            return outcome, self.call(node, record.target, "GetCopy", move).copy, False, lost
        return outcome, CopyState.UNREACHABLE, False, lost

    def bring(self, node: str, move: str, names: str) -> None:
        """Makes the socket here name that node, from any state that a crash may have left, without sending a packet."""
        record, program = self.journal[node, move], self.programs[node]
        socket = program.sockets[node]
        self.event(node, "filter")
        self.hold(node, move, node, record.peer, record.target)
        if not program.alive or socket.lost or (self.has_end(node, names) and program.running):
            return
        self.event(node, "stop the process")
        program.running = False
        self.event(node, "take the socket apart")
        socket.repair = True
        self.event(node, "put it together")
        socket.names, socket.repair = names, False
        self.event(node, "continue the process")
        program.running = program.alive

    def check_end(self, node: str, move: str, record: Record) -> None:
        """Called when the filter is removed: the socket here must name the node that the recorded outcome says."""
        program, outcome = self.programs[node], self.decided(move)
        if not program.alive or self.excused(node):
            return
        if outcome is None:
            raise Broken(f"{node} lets packets go before anything is decided")
        if not self.has_end(node, record.target if outcome is Outcome.COMMIT else record.peer):
            raise Broken(f"{node} lets packets go though its end is not where {outcome} says")
