"""Gates and communicators in the model of jobs, as in `snapshotd/moves/jobs/communicators.py` and `moves/nccl/gates.py`.

Both ranks are in one communicator. Each copy knows the number of the attempt that built its own, or 0 if it is down.
Invariants: a communicator changes only behind a closed gate; an image has none; a gate opens only when the communicator is
the same on all copies of the incarnation that live, or was abandoned because a member has ended; the gates of a job that is
resumed or rolled back open only after COMMIT.
"""

from __future__ import annotations

from snapshotd.moves.rules import GateDecision, GateFacts, Mark, Outcome, gate_next
from tests.protocol.job_world import Copy, JobWorld, Lost, Record, Refused


def gate_of(name: str) -> str:
    """The key of a node's record of its gates, beside that of the coordinator."""
    return f"{name} gate"


class JobGating(JobWorld):
    def check(self) -> None:
        super().check()
        for copy in self.copies if self.nccl else ():
            if not copy.running or copy.gated:
                continue
            began = self.journal.get((self.begun_at.get(copy.incarnation, ""), copy.incarnation))
            assert began is None or began.was_committed, f"a gate opened before COMMIT: {copy}"
            if copy.lost:
                continue
            assert copy.comm, f"a gate is open in front of a communicator that is down: {copy}"
            others = {c.comm for c in self.copies if c.alive and c.incarnation == copy.incarnation and not c.lost}
            assert others == {copy.comm}, f"a gate is open, and the communicator is not whole: {self.copies}"

    # ------------------------------------------------------------ every node

    def on_close_gates(self, node: str, name: str) -> object:
        if (node, gate_of(name)) not in self.journal:
            members = [c for c in self.copies if c.node == node and c.alive and c.running]
            if any(at == node and r.role == "gate" and not r.ended for (at, _), r in self.journal.items()):
                raise Refused("the gates are closed for another record")
            self.event(node, "mark gated")
            self.journal[node, gate_of(name)] = Record("gate", Mark.GATED, name, members=members)
        record = self.still_closed(node, name)
        self.event(node, "close the gates")
        for copy in record.members:
            copy.gated = True
        if not any(copy.alive for copy in record.members):
            raise Refused("a rank that has to reach the cut has ended")
        return None

    def still_closed(self, node: str, name: str) -> Record:
        record = self.journal.get((node, gate_of(name)))
        if record is None or record.outcome or record.ended:
            raise Refused("no gate is closed here for this record")
        return record

    def on_take_down(self, node: str, name: str) -> object:
        for copy in self.still_closed(node, name).members:
            self.change(node, copy, 0)
        return None

    def on_build(self, node: str, name: str, number: str) -> object:
        held = self.held_copies(node, name)
        for record in held:
            assert record.copy is not None
            self.change(node, record.copy, int(number), held=True)
            self.event(node, "mark attached")
            record.attached = True
        if not held:
            for copy in self.still_closed(node, name).members:
                self.change(node, copy, int(number))
        return None

    def held_copies(self, node: str, name: str) -> list[Record]:
        return [
            record
            for (at, _), record in self.journal.items()
            if (at, record.role, record.coordinator) == (node, "target", name)
            and record.mark is Mark.HELD
            and record.outcome is None
            and record.copy_exists
        ]

    def change(self, node: str, copy: Copy, number: int, *, held: bool = False) -> None:
        if not copy.alive:
            raise Refused("it has ended")
        if not copy.running and not held:
            raise Lost("a frozen process does not answer")
        self.event(node, "build the communicator" if number else "take the communicator down")
        assert copy.gated, f"the communicator changes behind an open gate: {copy}"
        if not number or not copy.comm:  # one that is up is not built again
            copy.comm = number

    def on_gate_report(self, node: str, name: str) -> object:
        """The communicators of the ranks here."""
        record = self.journal.get((node, gate_of(name)))
        found = [copy for copy in self.copies if copy.node == node] if record is None else record.members
        alive = [copy for copy in found if copy.alive]
        if not all(copy.running for copy in alive):
            raise Lost("a frozen process does not answer")
        return {copy.rank: copy.comm for copy in alive}

    def on_open_gates(self, node: str, name: str, abandoned: str) -> object:
        record = self.journal.get((node, gate_of(name)))
        if record is None or record.ended:
            return None
        self.event(node, "learn that the ranks go on")
        record.outcome, record.abandoned = Outcome.ABORT, record.abandoned or bool(abandoned)
        self.settle_gate(node, gate_of(name))
        return None

    def settle_gate(self, node: str, key: str) -> None:
        record, asked = self.journal[node, key], False
        facts = GateFacts(record.mark, record.outcome)
        while not record.ended:
            match gate_next(facts)[0]:
                case GateDecision.ASK:
                    if asked:
                        return
                    asked, facts = True, self.ask_for_gate(node, record)
                    continue
                case GateDecision.LEARN_ABORT:
                    self.event(node, "learn that the ranks go on")
                    record.outcome, record.abandoned = Outcome.ABORT, record.abandoned or facts.abandoned
                case GateDecision.OPEN:
                    for copy in [one for one in record.members if one.alive]:
                        self.open_gate(node, copy, abandoned=record.abandoned)
                    self.put(node, record, Mark.SETTLED)
                case other:
                    raise AssertionError(f"a node that was asked by a coordinator decides: {other}")
            facts = GateFacts(record.mark, record.outcome)

    def ask_for_gate(self, node: str, record: Record) -> GateFacts:
        undone = GateFacts(record.mark, None, Outcome.ABORT, source_undone=True)
        alive = [copy for copy in record.members if copy.alive]
        if not alive:
            return undone
        try:
            over = bool(self.call(node, self.coordinator_of(record), "job_settled", record.coordinator))
        except (Lost, Refused):
            over = False
        if not over:
            return GateFacts(record.mark, None)
        down = any(copy.comm == 0 for copy in alive)
        return GateFacts(record.mark, None, Outcome.ABORT, source_undone=True, abandoned=down)

    def on_job_settled(self, node: str, name: str) -> object:
        record = self.journal.get((node, name))
        return record is None or record.ended

    def open_gate(self, node: str, copy: Copy, *, abandoned: bool = False) -> None:
        """The shim refuses while the communicator is down, unless it is abandoned."""
        if not copy.running:
            raise Lost("a frozen process does not answer")
        if not copy.comm and not abandoned:
            raise Refused("the communicator is down: the gate stays closed")
        self.event(node, "open a gate")
        copy.gated, copy.lost = False, not copy.comm

    # ------------------------------------------------------------ the coordinator

    def on_job_detach(self, node: str, name: str) -> object:
        for at in self.members_of(self.open(node, name, "job")):
            self.call(node, at, "take_down", name)
        return None

    def on_job_attach(self, node: str, name: str) -> object:
        record = self.journal.get((node, name))
        if record is None:
            raise Refused("no such record")
        if not record.suspension:
            if self.put_back(node, name):
                raise Refused("communicators are never built again")
            return None
        for at, count in self.members_of(record).items():
            if len(self.held_copies(at, name)) < count:
                raise Refused("not all copies are held")
        self.build(node, name, record)
        return None

    def members_of(self, record: Record) -> dict[str, int]:
        """The nodes with ranks of a record, and how many each has."""
        nodes = [part[0] for part in record.parts]
        return {at: nodes.count(at) for at in nodes}

    def build(self, node: str, name: str, record: Record) -> None:
        self.builds += 1
        for at in self.members_of(record):
            self.call(node, at, "build", name, str(self.builds))

    def put_back(self, node: str, name: str) -> bool:
        """Builds again what is down, and opens the gates. Whether it was abandoned. Raises what keeps gates closed: retry."""
        record = self.journal[node, name]
        if not record.gated or record.gates_opened:
            return False
        comms: dict[int, int] = {}
        abandoned = False
        for at in self.members_of(record):
            try:
                reported = self.call(node, at, "gate_report", name)
                assert isinstance(reported, dict)
                comms |= reported
            except Lost:
                if (node, at) not in self.gone:
                    raise
                abandoned = True
        if 0 in comms.values():
            abandoned |= set(comms) != {0, 1}
            if not abandoned:
                try:
                    for at in self.members_of(record):
                        self.call(node, at, "take_down", name)
                    self.build(node, name, record)
                except Refused:  # a member has ended
                    abandoned = True
        for at in self.members_of(record):
            try:
                self.call(node, at, "open_gates", name, "abandoned" if abandoned else "")
            except Lost:
                if not abandoned or (node, at) not in self.gone:
                    raise
        self.event(node, "mark gates opened")
        record.gates_opened = True
        return abandoned
