"""The world of the model of jobs: nodes, processes, journals, images, calls, and faults that strike at every change.

Every change is an event, at which a fault can strike. Journals and stored images survive everything; what a daemon only has
in memory dies with it. After every event `check` compares the world with the invariant of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from snapshotd.moves.job_rules import Answer
from snapshotd.moves.rules import Mark, Outcome

if TYPE_CHECKING:
    from tests.protocol.job_model import JobModel

DRIVER = "driver"
#: The nodes of ranks 0 and 1, and a spare. The first one has the coordinator.
NODES = ("one", "two", "spare")


class Lost(Exception):
    """The caller has no answer."""


class Refused(Exception):
    """The answer is an error."""


class Unreadable(Refused):
    """The image is of no use."""


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
    bound_to: str = ""  # the coordinator that may end it; it ends by itself if it is cut off from it
    comm: int = 1  # the attempt that built its communicator; 0: it is down
    gated: bool = False
    lost: bool = False  # its communicator is never built again: it gets errors


@dataclass
class Record:
    """A daemon's journal entry."""

    role: str  # source, target, job or gate
    mark: Mark
    coordinator: str = ""
    outcome: Outcome | None = None
    rank: int = -1
    copy: Copy | None = None
    image: str = ""  # target: the move whose image it restores
    parts: list[tuple[str, str, str, str]] = field(default_factory=list)  # job: node, move, image node, image
    copies: list[list[tuple[str, str]]] = field(
        default_factory=list
    )  # snapshot: of each rank, the buddies' nodes and moves
    kind: str = ""  # snapshot, or copy
    continued: bool = False
    dropped: bool = False  # snapshot: it was given up
    ends: str = ""  # rollback: the incarnation that is over
    snapshot: str = ""  # rollback: the snapshot
    incarnation: str = ""  # snapshot: of which incarnation
    suspension: str = ""
    taken_back: bool = False  # a resumption that was committed, and of which a copy died before it ran
    in_life: int = 0  # of the daemon, when the last mark was made
    lease: bool = True
    ended: bool = False
    voters: tuple[str, ...] = ()  # snapshot: the nodes whose promises its coordinator needs
    handed_to: str = ""  # snapshot: the node that coordinates it now
    fenced: str = ""  # snapshot: its former coordinator, whose lease was over
    adopted: int = 0  # snapshot: how many coordinators it had before
    was_committed: bool = False  # also if that was overruled
    members: list[Copy] = field(default_factory=list)  # gate: the ranks behind it
    abandoned: bool = False  # gate: a communicator is never built again
    attached: bool = False  # target: the copy has its communicator
    gated: bool = False  # job: its ranks are in a communicator
    gates_opened: bool = False

    @property
    def copy_exists(self) -> bool:
        return self.copy is not None and self.copy.alive

    @property
    def places(self) -> list[tuple[str, str]]:
        """Job: the nodes and moves of all its participants, those of the copies last."""
        return [*((part[0], part[1]) for part in self.parts), *(copy for copies in self.copies for copy in copies)]


class JobWorld:
    """What all participants share."""

    def __init__(self, *, nccl: bool = False, bears: int = 1) -> None:
        """`nccl`: the ranks are in a communicator. `bears`: of how many nodes a snapshot must outlive the loss, because there
        are so many copies of each image."""
        self.nccl, self.builds, self.bears = nccl, 1, bears
        self.gone: set[tuple[str, str]] = set()  # (coordinator, node) that has been silent to it for GONE_S
        self.labels: list[str] = []
        self.faults: dict[int, Callable[[JobModel], None]] = {}
        self.up = dict.fromkeys((DRIVER, *NODES), True)
        self.life = dict.fromkeys(NODES, 0)
        self.cut: set[str] = set()
        self.journal: dict[tuple[str, str], Record] = {}
        self.images: dict[tuple[str, str], int] = {}  # whole ones of suspended ranks: (node, move) -> rank
        self.kept: dict[tuple[str, str], tuple[str, int]] = {}  # images of snapshots, in memory: snapshot, rank
        self.unreadable: dict[tuple[str, str], str] = {}  # of these: the call that notices it, send or restore
        self.stuck: set[tuple[str, str]] = set()  # … that do not reach any target
        self.protected = (
            False  # a snapshot was committed: from then on there is a complete one, unless too many nodes are lost
        )
        self.reboots = 0
        self.off: set[str] = set()  # nodes without power
        self.declared: set[str] = set()  # nodes that an operator has declared dead
        self.silent: set[tuple[str, str]] = set()  # (coordinator, node) that it has asked in vain for long
        #: (node, incarnation, coordinator): recorded there that it has ended, in the word of this coordinator
        self.over: set[tuple[str, str, str]] = set()
        self.begun_at: dict[str, str] = {}  # record of a job -> the node that coordinates it, as participants know it
        self.follows: dict[tuple[str, str], str] = {}  # (node, snapshot) -> the coordinator that has its promise
        self.settled: set[tuple[str, str]] = set()  # (node, snapshot): it was told that all nodes have confirmed it
        self.images_follow: dict[tuple[str, str], str] = {}  # (node, move) -> the successor of its coordinator
        self.lapsed: set[str] = set()  # nodes whose lease is over: they decide nothing before they have asked
        self.received: set[tuple[str, str]] = set()  # images that targets have received
        self.copies = [Copy(0, "one", "", running=True), Copy(1, "two", "", running=True)]
        self.killed = False  # a fault has ended processes of the job: from then on a rank may be gone for good

    # ------------------------------------------------------------ events and faults

    def event(self, who: str, what: str) -> None:
        self.labels.append(f"{who}: {what}")
        if (fault := self.faults.pop(len(self.labels) - 1, None)) is not None:
            fault(cast("JobModel", self))
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
        self.off.discard(node)
        self.silent = {pair for pair in self.silent if node not in pair}
        self.life[node] += 1
        for (where, move), record in self.journal.items():
            if where == node and record.role == "target" and record.mark in (Mark.PREPARED, Mark.RESTORING):
                self.sweep(node, move)
        for copy in self.copies:
            if copy.node == node and self.is_over(copy):
                copy.alive = copy.running = False

    def sweep(self, node: str, move: str) -> None:
        """Removes a copy that never ran, and its image."""
        record = self.journal[node, move]
        if record.copy is not None:
            record.copy.alive = record.copy.running = False
        self.received.discard((node, move))

    def heal(self) -> None:
        """What was down or cut off is back."""
        self.cut.clear()
        self.silent.clear()
        for node in NODES:
            self.start(node)

    def reboot(self, node: str) -> None:
        """All processes of a node end; its disk stays."""
        self.kill(node)
        self.off.add(node)
        self.lapsed.add(node)
        self.reboots += 1
        for place in [place for place in self.kept if place[0] == node]:
            del self.kept[place]
        for copy in self.copies:
            if copy.node == node and copy.alive:
                copy.alive = copy.running = False
                self.killed = True

    def move(self, rank: int, to: str) -> None:
        """A move of one rank, which is refused while a snapshot or a suspension of the rank is not settled on its node."""
        copy = next((c for c in self.copies if c.rank == rank and c.running), None)
        if copy is None or copy.node == to or not self.up[to] or not self.up[copy.node] or {to, copy.node} & self.cut:
            return
        if copy.gated:
            return
        if not any(r.copy is copy and r.role == "source" and not r.ended for r in self.journal.values()):
            copy.alive = copy.running = False
            over = (to, copy.incarnation, copy.bound_to) in self.over
            self.copies.append(Copy(rank, to, copy.incarnation, not over, not over, copy.bound_to, copy.comm))

    def is_over(self, copy: Copy) -> bool:
        return bool(copy.bound_to) and (copy.node, copy.incarnation, copy.bound_to) in self.over

    def apart(self, node: str, other: str) -> bool:
        """Whether one machine cannot reach the other."""
        return node != other and (bool({node, other} & self.cut) or other in self.off)

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
        exists = whole or {0, 1} in alive.values() or self.killed or self.protected
        assert exists, f"no rank and no image: {self.copies} {self.images}"
        for copy in running:  # what runs may not be beside a resumption that can still commit
            if copy.incarnation == "":
                assert not self.suspended(), "the suspended incarnation runs"
        assert not self.protected or self.reboots > self.bears or self.snapshot(), f"no complete snapshot: {self.kept}"

    def snapshot(self) -> str:
        """The newest snapshot of which every rank has an image somewhere, if it is one that counts."""
        for (_, name), record in reversed(self.journal.items()):
            counts = record.role == "job" and record.kind == "snapshot" and record.outcome is Outcome.COMMIT
            if counts and {rank for snapshot, rank in self.kept.values() if snapshot == name} == {0, 1}:
                return name
        return ""

    def suspended(self) -> bool:
        jobs = [one for one in self.journal.values() if one.role == "job" and not one.kind]
        return any(not one.suspension and one.outcome is Outcome.COMMIT for one in jobs)

    # ------------------------------------------------------------ marks

    def put(self, node: str, record: Record, mark: Mark) -> None:
        self.event(node, f"mark {mark}")
        record.mark, record.in_life = mark, self.life[node]
        record.ended = mark in (Mark.SETTLED, Mark.DISCARDED, Mark.ACTIVATED)

    def decide(self, node: str, record: Record, outcome: Outcome) -> Outcome:
        if record.outcome is None:
            self.event(node, f"record {outcome}")
            record.outcome, record.was_committed = outcome, outcome is Outcome.COMMIT
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

    def coordinator_of(self, record: Record) -> str:
        return self.begun_at.get(record.coordinator, NODES[0])

    def interrupted(self, node: str, record: Record) -> bool:
        return record.mark in (Mark.FREEZING, Mark.FROZEN) and record.in_life < self.life[node]

    def ask(self, node: str, record: Record) -> Answer:
        try:
            return Answer(str(self.call(node, self.coordinator_of(record), "job_outcome", record.coordinator)))
        except (Lost, Refused):
            return Answer.UNREACHABLE
