"""The model of the daemons that suspend and resume a job: it serves the calls of `migrator/job_protocol.py`.

The decisions are those of `snapshotd/moves/job_rules.py` and `rules.target_next` themselves. Every change is an event, at
which a fault can strike. Journals and stored images survive everything; what a daemon only has in memory dies with it.
After every event `check` compares the world with the invariant of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, JobDecision, Part, StoreDecision, StoreFacts
from snapshotd.moves.rules import CopyState, Mark, Outcome, TargetDecision, TargetFacts, target_answer, target_next

DRIVER = "driver"
#: The nodes of ranks 0 and 1, and a spare. The first one has the coordinator.
NODES = ("one", "two", "spare")


class Lost(Exception):
    """The caller has no answer."""


class Refused(Exception):
    """The answer is an error."""


class Died(Exception):
    """The process that was at work has died."""

    def __init__(self, who: str) -> None:
        super().__init__(who)
        self.who = who


@dataclass
class Copy:
    """The processes of one rank."""

    rank: int
    node: str
    incarnation: str  # "": the one that was started; else the record of the resumption
    running: bool = False
    alive: bool = True


@dataclass
class Record:
    """A daemon's journal entry."""

    role: str  # source, target or job
    mark: Mark
    coordinator: str = ""
    outcome: Outcome | None = None
    rank: int = -1
    copy: Copy | None = None
    image: str = ""  # target: the move whose image it restores
    parts: list[tuple[str, str, str, str]] = field(default_factory=list)  # job: node, move, image node, image
    suspension: str = ""
    in_life: int = 0  # of the daemon, when the last mark was made
    lease: bool = True
    ended: bool = False

    @property
    def copy_exists(self) -> bool:
        return self.copy is not None and self.copy.alive


class JobModel:
    """All participants together."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.faults: dict[int, Callable[[JobModel], None]] = {}
        self.up = dict.fromkeys((DRIVER, *NODES), True)
        self.life = dict.fromkeys(NODES, 0)
        self.cut: set[str] = set()
        self.journal: dict[tuple[str, str], Record] = {}
        self.images: dict[tuple[str, str], int] = {}  # whole ones of suspended ranks: (node, move) -> rank
        self.received: set[tuple[str, str]] = set()  # images that targets have received
        self.copies = [Copy(0, "one", "", running=True), Copy(1, "two", "", running=True)]
        self.killed = False  # a fault has ended processes of the job: from then on a rank may be gone for good

    # ------------------------------------------------------------ events and faults

    def event(self, who: str, what: str) -> None:
        self.labels.append(f"{who}: {what}")
        if (fault := self.faults.pop(len(self.labels) - 1, None)) is not None:
            fault(self)
        self.check()
        if not self.up[who]:
            raise Died(who)

    def call(self, caller: str, node: str, rpc: str, *args: str) -> object:
        self.event(caller, f"{rpc} asked of {node}")
        if not self.up[node] or (caller != node and {caller, node} & self.cut):
            raise Lost(f"{node} does not answer")
        try:
            answer: object = getattr(self, f"on_{rpc}")(node, *args)
        except Died as died:
            if died.who == node and caller != node:
                raise Lost(f"{node} died") from None
            raise
        if not self.up[caller]:
            raise Died(caller)
        return answer

    def kill(self, who: str) -> None:
        self.up[who] = False

    def start(self, node: str) -> None:
        """A daemon starts again."""
        if self.up[node]:
            return
        self.up[node] = True
        self.life[node] += 1
        for (where, move), record in self.journal.items():
            if where == node and record.role == "target" and record.mark in (Mark.PREPARED, Mark.RESTORING):
                self.sweep(node, move)

    def heal(self) -> None:
        """What was down or cut off is back."""
        self.cut.clear()
        for node in NODES:
            self.start(node)

    def reboot(self, node: str) -> None:
        """All processes of a node end; its disk stays."""
        self.kill(node)
        for copy in self.copies:
            if copy.node == node and copy.alive:
                copy.alive = copy.running = False
                self.killed = True

    def check(self) -> None:
        """The invariant."""
        running = [copy for copy in self.copies if copy.running]
        assert all(copy.alive for copy in running)
        incarnations = {copy.incarnation for copy in running}
        assert len(incarnations) <= 1, f"two incarnations run: {running}"
        assert len({copy.rank for copy in running}) == len(running), f"a rank runs twice: {running}"
        whole = set(self.images.values()) == {0, 1}
        alive: dict[str, set[int]] = {}
        for copy in self.copies:
            if copy.alive:
                alive.setdefault(copy.incarnation, set()).add(copy.rank)
        assert whole or self.killed or {0, 1} in alive.values(), f"no rank and no image: {self.copies} {self.images}"
        for copy in running:  # what runs may not be beside a resumption that can still commit
            if copy.incarnation == "":
                assert not self.suspended(), "the suspended incarnation runs"

    def suspended(self) -> bool:
        return any(
            r.role == "job" and not r.suspension and r.outcome is Outcome.COMMIT for r in self.journal.values()
        ) and bool(self.copies)

    # ------------------------------------------------------------ marks

    def put(self, node: str, record: Record, mark: Mark) -> None:
        self.event(node, f"mark {mark}")
        record.mark, record.in_life = mark, self.life[node]
        record.ended = mark in (Mark.SETTLED, Mark.DISCARDED, Mark.ACTIVATED)

    def decide(self, node: str, record: Record, outcome: Outcome) -> Outcome:
        if record.outcome is None:
            self.event(node, f"record {outcome}")
            record.outcome = outcome
        return record.outcome

    def open(self, node: str, move: str, role: str, *marks: Mark) -> Record:
        record = self.journal.get((node, move))
        if record is None or record.role != role or record.outcome is not None or record.ended:
            raise Refused(f"{move} is not open on {node}")
        if marks and record.mark not in marks:
            raise Refused(f"{move} on {node} is {record.mark}")
        if role == "source" and self.interrupted(node, record):
            raise Refused("interrupted by a restart")
        record.lease = True
        return record

    def interrupted(self, node: str, record: Record) -> bool:
        return record.mark in (Mark.FREEZING, Mark.FROZEN) and record.in_life < self.life[node]

    # ------------------------------------------------------------ the coordinator

    def on_job_begin(self, node: str, name: str, suspension: str, *parts: str) -> object:
        if (node, name) in self.journal:
            self.open(node, name, "job")
            return None
        if any(r.role == "job" and not r.ended and r.outcome is None for r in self.journal.values()):
            raise Refused("busy")
        if suspension:
            known = self.journal.get((node, suspension))
            if known is None or known.outcome is not Outcome.COMMIT or self.resumed(suspension):
                raise Refused("not suspended")
        self.event(node, "mark begun")
        listed = [(n, m, i, s) for n, m, i, s in (part.split() for part in parts)]
        self.journal[node, name] = Record("job", Mark.BEGUN, parts=listed, suspension=suspension)
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
            self.decide(node, record, Outcome.COMMIT)
        return record.outcome

    def on_job_abort(self, node: str, name: str) -> object:
        if (node, name) not in self.journal:
            self.event(node, "record ABORT")
            self.journal[node, name] = Record("job", Mark.SETTLED, outcome=Outcome.ABORT, ended=True)
        return self.decide(node, self.journal[node, name], Outcome.ABORT)

    def on_job_outcome(self, node: str, name: str) -> object:
        record = self.journal.get((node, name))
        if record is None:
            return Answer.UNKNOWN
        return Answer.UNDECIDED if record.outcome is None else Answer(record.outcome.value)

    def ask_parts(self, node: str, record: Record) -> dict[str, Part]:
        found: dict[str, Part] = {}
        for at, move, _, _ in record.parts:
            try:
                found[at + move] = Part(str(self.call(node, at, "part", move)))
            except (Lost, Refused):
                found[at + move] = Part.UNREACHABLE
        return found

    def on_part(self, node: str, move: str) -> object:
        record = self.journal.get((node, move))
        if record is None:
            return Part.ABSENT
        if record.role == "target":
            return job_rules.target_part(target_answer(self.target_facts(record)))
        if record.ended:
            return Part.DONE
        return job_rules.store_answer(record.mark, record.outcome, copy_exists=record.copy_exists)

    def settle_job(self, node: str, name: str) -> None:
        record = self.journal[node, name]
        parts: dict[str, Part] = {}
        for _ in range(3):
            decision, _ = job_rules.job_next(
                record.mark, record.outcome, parts.values(), lease_expired=not record.lease
            )
            if decision is JobDecision.RECORD_ABORT:
                self.decide(node, record, Outcome.ABORT)
            elif decision is JobDecision.ASK and not parts:
                parts = self.ask_parts(node, record)
            elif decision is JobDecision.CLOSE and not record.ended:
                if record.outcome is Outcome.COMMIT and record.suspension:
                    for _, _, at, image in record.parts:
                        self.call(node, at, "drop", image)
                self.put(node, record, Mark.SETTLED)
            else:
                return

    # ------------------------------------------------------------ a store

    def on_begin(self, node: str, move: str, rank: str, coordinator: str) -> object:
        if (node, move) in self.journal:
            self.open(node, move, "source", Mark.BEGUN)
            return None
        copy = next((c for c in self.copies if c.rank == int(rank) and c.node == node and c.running), None)
        if copy is None or any(r.copy is copy and not r.ended for r in self.journal.values()):
            raise Refused("no such rank, or busy")
        self.event(node, "mark begun")
        self.journal[node, move] = Record("source", Mark.BEGUN, coordinator, rank=int(rank), copy=copy)
        return None

    def on_freeze(self, node: str, move: str) -> object:
        record = self.open(node, move, "source", Mark.BEGUN, Mark.FROZEN)
        if record.mark is Mark.BEGUN:
            self.put(node, record, Mark.FREEZING)
            if record.copy is None or not record.copy.alive:
                raise Refused("the rank has ended")
            record.copy.running = False
            self.event(node, "frozen")
            self.put(node, record, Mark.FROZEN)
        return None

    def on_stream(self, node: str, move: str) -> object:
        record = self.open(node, move, "source", Mark.FROZEN, Mark.STREAMED)
        if record.mark is Mark.FROZEN:
            self.event(node, "dump")
            if not record.copy_exists:
                raise Refused("the rank has ended")
            self.images[node, move] = record.rank
            self.put(node, record, Mark.STREAMED)
        return None

    def on_abort(self, node: str, move: str) -> object:
        record = self.journal.get((node, move))
        if record is None:
            self.event(node, "record ABORT")
            self.journal[node, move] = Record("source", Mark.SETTLED, outcome=Outcome.ABORT, ended=True)
            return None
        if record.outcome is None and record.mark is not Mark.STREAMED:
            self.decide(node, record, Outcome.ABORT)
        self.settle_store(node, move)
        return None

    def on_release(self, node: str, move: str) -> object:
        self.settle_store(node, move)
        if not self.journal[node, move].ended:
            raise Refused("not released yet")
        return None

    def ask(self, node: str, record: Record) -> Answer:
        try:
            return Answer(str(self.call(node, NODES[0], "job_outcome", record.coordinator)))
        except (Lost, Refused):
            return Answer.UNREACHABLE

    def settle_store(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        for _ in range(3):
            if record.ended:
                return
            said = self.ask(node, record) if record.outcome is None else Answer.UNDECIDED
            facts = StoreFacts(
                mark=record.mark,
                outcome=record.outcome,
                copy_exists=record.copy_exists,
                interrupted=self.interrupted(node, record),
                lease_expired=not record.lease,
                coordinator=said,
            )
            match job_rules.store_next(facts)[0]:
                case StoreDecision.RECORD_ABORT:
                    self.decide(node, record, Outcome.ABORT)
                case StoreDecision.RECORD_COMMIT:
                    self.decide(node, record, Outcome.COMMIT)
                case StoreDecision.THAW:
                    self.event(node, "drop the image")
                    self.images.pop((node, move), None)
                    self.event(node, "thaw")
                    if record.copy is not None and record.copy.alive:
                        record.copy.running = True
                    self.put(node, record, Mark.SETTLED)
                case StoreDecision.RELEASE:
                    self.event(node, "end the processes")
                    if record.copy is not None:
                        record.copy.alive = record.copy.running = False
                    self.put(node, record, Mark.SETTLED)
                case _:
                    return

    def on_get_image(self, node: str, move: str) -> object:
        record = self.journal.get((node, move))
        if record is None or not record.ended or (node, move) not in self.images:
            raise Refused("no such image")
        return None

    def on_send(self, node: str, image: str, target: str, move: str) -> object:
        self.on_get_image(node, image)
        try:
            self.call(node, target, "seal", move)
        except Lost as lost:
            raise Refused("the target does not answer") from lost
        return None

    def on_drop(self, node: str, image: str) -> object:
        self.event(node, "drop the image")
        self.images.pop((node, image), None)
        return None

    # ------------------------------------------------------------ a target

    def on_prepare(self, node: str, move: str, rank: str, image: str, coordinator: str) -> object:
        if (node, move) in self.journal:
            self.open(node, move, "target", Mark.PREPARED)
            return None
        if self.call(node, NODES[0], "job_outcome", coordinator) is not Answer.UNDECIDED:
            raise Refused("the resumption has ended")
        self.event(node, "mark prepared")
        self.journal[node, move] = Record(
            "target", Mark.PREPARED, coordinator, rank=int(rank), image=image, in_life=self.life[node]
        )
        return None

    def on_seal(self, node: str, move: str) -> object:
        record = self.open(node, move, "target", Mark.PREPARED, Mark.SEALED)
        if record.in_life < self.life[node]:
            raise Refused("restarted in the middle")
        self.received.add((node, move))
        self.put(node, record, Mark.SEALED)
        return None

    def on_restore(self, node: str, move: str) -> object:
        record = self.open(node, move, "target", Mark.SEALED, Mark.HELD)
        if record.mark is Mark.SEALED:
            if (node, move) not in self.received:
                raise Refused("no image")
            self.put(node, record, Mark.RESTORING)
            record.copy = Copy(record.rank, node, record.coordinator)
            self.copies.append(record.copy)
            self.event(node, "criu restore")
            self.put(node, record, Mark.HELD)
        if not record.copy_exists:
            raise Refused("the copy is gone")
        return None

    def on_activate(self, node: str, move: str) -> object:
        self.settle_target(node, move)
        record = self.journal.get((node, move))
        if record is None or record.mark is not Mark.ACTIVATED:
            raise Refused("it does not run yet")
        return None

    def on_discard(self, node: str, move: str) -> object:
        if (node, move) in self.journal:
            self.settle_target(node, move)
        return None

    def target_facts(self, record: Record) -> TargetFacts:
        return TargetFacts(record.mark, record.outcome, record.copy_exists)

    def sweep(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        if record.copy is not None:
            record.copy.alive = record.copy.running = False
        self.received.discard((node, move))

    def settle_target(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        for _ in range(3):
            match target_next(self.target_facts(record))[0]:
                case TargetDecision.ACTIVATE:
                    if record.mark is not Mark.ACTIVATED:
                        self.put(node, record, Mark.ACTIVATED)
                    self.event(node, "wake")
                    if record.copy is not None and record.copy.alive:
                        record.copy.running = True
                    return
                case TargetDecision.ASK_SOURCE:
                    said = self.ask(node, record)
                    if said in (Answer.COMMIT, Answer.ABORT):
                        self.decide(node, record, Outcome(said.value))
                    elif said is Answer.UNKNOWN and record.mark is not Mark.HELD:
                        self.decide(node, record, Outcome.ABORT)
                    else:
                        return
                case _:
                    if record.mark not in (Mark.ACTIVATED, Mark.DISCARDED):
                        self.event(node, "drop the copy")
                        self.sweep(node, move)
                        self.put(node, record, Mark.DISCARDED)
                    return

    # ------------------------------------------------------------ without a driver

    def settle(self, rounds: int = 4) -> None:
        """Everything is there again, and no driver: leases expire, and every daemon settles what is open."""
        self.faults.clear()
        self.heal()
        for _ in range(rounds):
            for (node, move), record in list(self.journal.items()):
                record.lease = False
                asleep = record.mark is Mark.ACTIVATED and record.copy_exists
                if record.ended and not (asleep and record.copy is not None and not record.copy.running):
                    continue
                with suppress(Lost, Refused):
                    {"job": self.settle_job, "source": self.settle_store, "target": self.settle_target}[record.role](
                        node, move
                    )

    def unfinished(self) -> list[str]:
        return [f"{node} {move} {record}" for (node, move), record in self.journal.items() if not record.ended]

    def running(self) -> list[tuple[int, str]]:
        return sorted((copy.rank, copy.node) for copy in self.copies if copy.running)

    def state_of(self, node: str, move: str) -> CopyState:
        return target_answer(self.target_facts(self.journal[node, move]))
