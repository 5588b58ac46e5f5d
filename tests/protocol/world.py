"""Simulates two nodes, one rank and its peers as deterministic discrete events, without processes, clocks or sleeps.

Every visible action is one `event`. A fault scheduled for that event takes effect just before the action, and the invariants
are checked before and after it. A daemon that dies inside a handler does nothing more, and its caller gets no answer. The
daemons' behaviour is in `model.py`.

The journal (marks, outcomes, declarations) is durable. A reboot loses the copies, images and filters of a node. The death of
a daemon ends its handlers. The connections are in `network.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from snapshotd.moves.rules import CopyState, Mark, Outcome
from tests.protocol.network import AWAY, HOME, PEER, Broken, Copy, Network

DRIVER = "driver"
PERSON, TARGET = "a person", "the target"  # these can overrule an outcome
NODES = (HOME, AWAY)
LEASE_S = 30.0


class Died(Exception):
    """The acting participant has died."""


class Lost(Exception):
    """No answer: the request was not delivered, not done, or done and its answer lost. The caller cannot tell which."""


class Refused(Exception):
    """The daemon refuses the request."""


@dataclass(eq=False)
class Record:
    """One daemon's journal record of one move. A real daemon finds `copy` again by cgroup, pid and boot id."""

    role: str
    peer: str
    mark: Mark
    nonce: bytes = b""
    outcome: Outcome | None = None  # source: the write-once record; target: what it has learned
    overruled_by: str = (
        ""  # what overruled the outcome: PERSON (the other node is dead) or TARGET (its copy died before it ran)
    )
    copy: Copy | None = None
    rewires: tuple[str, ...] = ()  # the peers whose connections are, or may be, filtered here
    target: str = ""  # peer, gate: the target of the move; `peer` is then the source
    detached: bool = False  # source: the communicator is, or may be, taken down; its rank may be the only member left
    detached_on: tuple[str, ...] = ()  # source: peers whose members of the communicator are, or may be, taken down
    abandoned: bool = False  # the communicator stays down where it is down: the job gets errors
    lease_until_s: float = 0.0
    marked_in_life: int = 0
    ended: bool = False  # carried out and closed; the daemon ignores it from now on

    @property
    def copy_exists(self) -> bool:
        return self.copy is not None and self.copy.alive

    @property
    def holds(self) -> Outcome | None:
        """The outcome that this daemon acts on and reports."""
        return Outcome.ABORT if self.overruled_by and self.role == "source" else self.outcome


@dataclass(frozen=True)
class Answer:
    kind: str = ""
    token: bytes = b""
    copy: CopyState = CopyState.UNREACHABLE
    peers: tuple[str, ...] = ()
    settled: bool = False  # the outcome is carried out
    abandoned: bool = False


Fault = Callable[["World"], None]


class World(Network):
    """The whole simulation. `faults` maps the number of an event to the fault at that event."""

    def __init__(
        self, faults: Mapping[int, Fault] | None = None, *, ticking: bool = True, peers: tuple[str, ...] = (PEER,)
    ) -> None:
        super().__init__(peers)
        self.faults = dict(faults or {})
        self.ticking = ticking  # daemons settle between any two requests, and kernels retransmit at every event
        self.now_s = 0.0
        self.labels: list[str] = []
        self.daemons = (*NODES, *peers)
        self.life = dict.fromkeys((DRIVER, *self.daemons), 0)
        self.up = dict.fromkeys((DRIVER, *self.daemons), True)
        self.coming_back: set[str] = set()
        self.dead_for_ever: set[str] = set()
        self.images: set[tuple[str, str]] = set()
        self.journal: dict[tuple[str, str], Record] = {}
        self.said_dead: set[tuple[str, str]] = set()  # (target, move) that has answered GONE or DISCARDED
        self.locked: set[tuple[str, str]] = set()  # (node, move) whose daemon is between a decision and its mark
        self.in_flight: list[tuple[str, str, tuple[object, ...]]] = []
        self.keeper_killed = self.criu_killed = self.drop = self.delay = False
        self.attempts = 0  # attempts to recreate the communicator
        self.given_up = False  # the communicator will not be recreated
        self._frames: list[tuple[str, int]] = []
        self._written: dict[tuple[str, str], Outcome] = {}

    # ------------------------------------------------------------ events and invariants

    def event(self, who: str, label: str) -> None:
        self.check()
        fault = self.faults.pop(len(self.labels), None)
        self.labels.append(f"{who}: {label}")
        if fault is not None:
            fault(self)
        if self._frames[-1] != (who, self.life[who]) or not self.up[who]:
            raise Died(who)

    def check(self) -> None:
        self.retransmit(for_real=self.ticking)
        running = [copy for copy in self.copies if copy.alive and copy.running]
        if len(running) > 1:
            raise Broken(f"{len(running)} copies run")
        for (node, move), record in self.journal.items():
            if record.role == "source" and record.outcome is not None:
                if self._written.setdefault((node, move), record.outcome) is not record.outcome:
                    raise Broken("the outcome record has changed")
                if record.outcome is Outcome.COMMIT and record.copy in running and not record.overruled_by:
                    raise Broken("the source's copy runs after COMMIT")
                if record.overruled_by == TARGET and (record.peer, move) not in self.said_dead:
                    raise Broken("the source has recorded a report that the target never gave")
            if record.role == "target" and record.copy in running and not record.overruled_by:
                source = self.journal.get((record.peer, move))
                if source is None or source.outcome is not Outcome.COMMIT:
                    raise Broken("the target's copy runs without COMMIT")
        for node, move in self.said_dead:
            if self.journal[node, move].mark is Mark.ACTIVATED:
                raise Broken("a copy that was said to be dead and unrun is let go")
            if any(copy.alive for copy in self.copies if (copy.node, copy.restored_for) == (node, move)):
                raise Broken("a copy that was said to be dead lives")

    def decided(self, move: str) -> Outcome | None:
        """How a move ends: by the source's record, a person's declaration, or a copy that was dropped before it ran."""
        source: Outcome | None = None
        for (_, name), record in self.journal.items():
            if name == move and record.role == "target" and (record.overruled_by or record.mark is Mark.DISCARDED):
                return Outcome.COMMIT if record.overruled_by else Outcome.ABORT
            if name == move and record.role == "source":
                source = record.holds
        return source

    def excused(self, peer: str) -> bool:
        """Whether this connection may be lost, because the rank or the peer's process has died."""
        if peer in self.severed or self.keeper_killed or not any(copy.alive for copy in self.copies):
            return True
        dead = {}  # by copy that died: whether its last move made it the copy that may run
        for record in self.journal.values():
            if record.copy is not None and record.copy.fell and record.role != "gate":
                own = record.holds is Outcome.ABORT if record.role == "source" else record.mark is Mark.ACTIVATED
                dead[record.copy] = own
        return any(dead.values())

    @contextmanager
    def acting(self, who: str) -> Iterator[None]:
        self._frames.append((who, self.life[who]))
        try:
            yield
        finally:
            self._frames.pop()

    @contextmanager
    def at_work(self, node: str, move: str) -> Iterator[None]:
        """The daemon's lock of one move, which is released if the daemon dies."""
        self.locked.add((node, move))
        try:
            yield
        finally:
            self.locked.discard((node, move))

    def reaches(self, one: str, other: str) -> bool:
        return self.up[other] and frozenset((one, other)) not in self.cuts

    def call(self, caller: str, node: str, rpc: str, *args: object) -> Answer:
        if caller == DRIVER:
            self.come_back()
            if self.ticking:
                self.tick()
        self.event(caller, f"{rpc} asked")
        if self.delay:
            self.in_flight.append((node, rpc, args))
        lost, self.drop, self.delay = self.drop or self.delay, False, False
        if lost or not self.reaches(caller, node):
            raise Lost(f"{rpc} does not reach {node}")
        try:
            with self.acting(node):
                answer = self.serve(node, rpc, args)
                self.event(node, f"{rpc} answered")
        except Died as died:
            raise Lost(f"{node} died during {rpc}") from died
        finally:
            self.check()
            if self._frames[-1] != (caller, self.life[caller]):
                raise Died(caller)  # while it waited
        lost, self.drop = self.drop, False
        if lost or not self.reaches(caller, node):
            raise Lost(f"{rpc} was done, its answer is lost")
        return answer

    # ------------------------------------------------------------ writing to a journal

    def mark(self, node: str, record: Record, mark: Mark) -> None:
        self.event(node, f"mark {mark}")
        record.mark, record.marked_in_life = mark, self.life[node]

    def end(self, node: str, record: Record) -> None:
        self.event(node, "close")
        record.ended = True

    # ------------------------------------------------------------ deaths and returns

    def kill(self, who: str) -> None:
        self.life[who] += 1
        self.up[who] = False

    def reboot(self, node: str) -> None:
        """The daemon and every process of the node die; the journal stays."""
        self.kill(node)
        self.images -= {image for image in self.images if image[0] == node}
        self.power_off(node)

    def renew_leases(self, node: str) -> None:
        """Leases are in a daemon's memory, so they start again when it restarts."""
        for (where, _), record in self.journal.items():
            if where == node:
                record.lease_until_s = self.now_s + LEASE_S

    def come_back(self) -> None:
        for node in sorted(self.coming_back - self.dead_for_ever):
            self.up[node] = True
            self.off.discard(node)
            self.renew_leases(node)
            self.tick(node)  # before it serves requests
        self.coming_back.clear()

    def settle(self, rounds: int = 2) -> None:
        """Without a driver, time passes, dead daemons are restarted, and delayed requests arrive."""
        for _ in range(rounds):
            self.now_s += LEASE_S + 1
            self.coming_back |= {node for node in self.daemons if not self.up[node]}
            self.come_back()
            in_flight, self.in_flight = self.in_flight, []
            for node, rpc, args in in_flight:
                if self.up[node]:
                    with self.acting(node), suppress(Died, Lost, Refused):
                        self.serve(node, rpc, args)
            self.tick()
            self.retransmit(for_real=True)
            for node in self.peers:
                program = self.programs[node]
                if self.up[node] and program.alive and not program.running:
                    raise Broken(f"the process on {node} waits for more than its own connection")
        self.check()

    def tick(self, *nodes: str) -> None:
        """Each running daemon checks its keeper and settles its unfinished moves."""
        for node in nodes or self.daemons:
            moves = [move for (where, move), record in self.journal.items() if where == node and not record.ended]
            for move in ("", *moves):
                if self.up[node]:
                    with self.acting(node), suppress(Died, Lost, Refused):
                        self.look(node, move)

    @abstractmethod
    def serve(self, node: str, rpc: str, args: tuple[object, ...]) -> Answer:
        """The daemon of `node` handles a request."""

    @abstractmethod
    def look(self, node: str, move: str) -> None:
        """The daemon of `node` settles an unfinished move, or without a move checks the keeper."""
