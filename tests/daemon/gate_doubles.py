"""A cluster of gates in one process: real operations and journals, over sleeping processes and shims that only record.

Requests to shims are recorded in `Shims.said`, in order. Clients call the other nodes' operations directly.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NcclFailed, NotFound, Unreachable
from snapshotd.inprocess import ncclctl
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.nccl.gates import GateSteps
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process

MOVE, NONCE = "m-0123456789ab", bytes(range(32))
ALICE, BOB = 1500, 1501
WORLD, PAIR = "0" * 15 + "a", "0" * 15 + "b"


class Shims:
    """The shims of all processes."""

    def __init__(self) -> None:
        self.comms: dict[Process, dict[str, list[Any]]] = {}  # [nranks, rank, state]
        self.ended: dict[Process, dict[str, list[Any]]] = {}
        self.closed: set[Process] = set()
        self.said: list[tuple[str, int, Any]] = []
        self.failing: dict[str, int] = {}  # how often each operation fails
        self.waiting: set[Process] = set()  # processes whose attach waits for the others
        self.failing_process: Process | None = None  # process whose attach fails
        self.limits_s: list[float] = []  # of each attach
        self.before: Any = lambda what: None

    def _hear(self, what: str, process: Process, more: Any = None) -> None:
        self.before(what)
        self.said.append((what, process.pid, more))
        if self.failing.get(what, 0):
            self.failing[what] -= 1
            raise NcclFailed(f"process {process.pid} cannot {what}")

    def reports(self, pids: Sequence[int]) -> list[tuple[Process, ncclctl.Report]]:
        return [(process, self.read(process)) for process in self.comms if process.pid in set(pids)]

    def read(self, process: Process) -> ncclctl.Report:
        comms = [
            {"id": comm, "nranks": nranks, "rank": rank, "state": state, "refused": []}
            for comm, (nranks, rank, state) in self.comms[process].items()
        ]
        ended = [
            {"id": comm, "nranks": nranks, "rank": rank, "state": "destroyed"}
            for comm, (nranks, rank, _) in self.ended.get(process, {}).items()
        ]
        gate = "closed" if process in self.closed else "open"
        return ncclctl.parse(
            json.dumps({"gate": gate, "instance": 1, "comms": comms, "ended": ended, "nccl_threads": 0})
        )

    def destroy(self, process: Process, comm: str) -> None:
        """The application destroys a communicator, which does not wait at the gate."""
        self.ended.setdefault(process, {})[comm] = self.comms[process].pop(comm)

    def close(self, process: Process) -> None:
        self._hear("close", process)
        self.closed.add(process)

    def open_gate(self, process: Process, *, abandon: bool = False) -> None:
        self._hear("open", process, "abandon" if abandon else None)
        if not abandon and any(state in ncclctl.DOWN for _, _, state in self.comms.get(process, {}).values()):
            raise NcclFailed(f"process {process.pid} cannot open its gate: a communicator is not attached")
        self.closed.discard(process)

    def set_targets(self, process: Process, lines: Sequence[str]) -> None:
        self._hear("targets", process, list(lines))

    def detach(self, process: Process, comms: Sequence[str], timeout_s: float) -> None:
        self._hear("detach", process, list(comms))
        self._turn(process, comms, "detached")

    def new_id(self, process: Process, timeout_s: float) -> str:
        self._hear("new-id", process)
        return f"{process.pid:0256x}"

    def attach(self, process: Process, lines: Sequence[str], timeout_s: float, given_up: threading.Event) -> None:
        self._hear("attach", process, list(lines))
        self.limits_s.append(timeout_s)
        if process == self.failing_process:
            raise NcclFailed(f"process {process.pid} cannot attach")
        if process in self.waiting:
            assert given_up.wait(60), "it was not asked to give up"
            raise ncclctl.gave_up(f"process {process.pid}")
        asked = [line.split()[0] for line in lines]
        for comm in set(asked) & self.comms[process].keys():
            if sum(comm in comms for comms in self.comms.values()) < self.comms[process][comm][0]:
                assert given_up.wait(60), f"a member of {comm} does not come"
                raise ncclctl.gave_up(f"process {process.pid}")
        self._turn(process, asked, "live")

    def _turn(self, process: Process, comms: Sequence[str], state: str) -> None:
        for comm in set(comms) & self.comms[process].keys():
            self.comms[process][comm][2] = state

    def states(self) -> set[str]:
        return {state for comms in self.comms.values() for _, _, state in comms.values()}

    def of(self, what: str) -> list[tuple[int, Any]]:
        return [(pid, more) for said, pid, more in self.said if said == what]


@dataclass
class Answers:
    """The answers of source and target when they are asked for the outcome; None: no answer."""

    outcome: pb.Outcome | None = None
    unknown: bool = False
    copy: pb.Copy | None = None

    async def get_outcome(self, request: pb.MoveRequest, *, timeout_s: float) -> pb.Outcome:
        if self.unknown:
            raise NotFound("no such move")
        if self.outcome is None:
            raise Unreachable("no daemon listens there")
        return self.outcome

    async def get_copy(self, request: pb.MoveRequest, *, timeout_s: float) -> pb.Copy:
        if self.copy is None:
            raise Unreachable("no daemon listens there")
        return self.copy


@dataclass
class Here:
    """One node: its operations, and those that other nodes can call."""

    name: str
    cluster: Cluster
    state_dir: Path
    entries: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(
            node=self.name,
            state_dir=self.state_dir,
            advertise=f"{self.name}:7070",
            nccl_timeout_s=60,
            nccl_member_timeout_ms=20,
        )
        self.reserve = None
        # No rank here has device memory.
        self.holder = SimpleNamespace(drop=lambda keys: None, leave=lambda user: None, kept=dict)
        self.room = Room(self.state_dir / "room", self.name)
        self.journal = Journal(self.state_dir)
        self.ranks = SimpleNamespace(all=lambda: self.entries)
        self.gpus = SimpleNamespace(inventory=self._inventory)
        self.reachable = True
        self.missed: list[str] = []  # the calls while it was not reachable
        self.start()

    def start(self) -> None:
        """Starts the daemon, or restarts it."""
        node: Any = self
        self.gates = GateSteps(node)
        self.members = Members(self.gates, lambda move: None)
        self.communicators = Communicators(node, self.members)

    async def _inventory(self) -> Any:
        return SimpleNamespace(gpus=[])

    def client(self, name: str, endpoint: str) -> Any:
        other = self.cluster.nodes[name]
        caller = self.name

        async def called(operation: Any, *arguments: Any, **named: Any) -> Any:
            if not other.reachable:
                other.missed.append(operation.__name__)
                raise Unreachable(f"node {name} could not be reached")
            return await operation(*arguments, **named)

        async def list_ranks(request: Any, timeout_s: float) -> pb.ListRanksReply:
            ranks = [entry.to_proto(name) for entry in other.entries]
            return pb.ListRanksReply(ranks=ranks)

        async def get_node(request: Any) -> pb.NodeInfo:
            return pb.NodeInfo(name=name)

        gates, members = other.gates, other.members
        return _Client(
            node=SimpleNamespace(
                ListRanks=lambda request, timeout_s: called(list_ranks, request, timeout_s),
                GetNode=lambda request, timeout_s: called(get_node, request),
            ),
            source=SimpleNamespace(GetOutcome=self.cluster.answers.get_outcome),
            job=SimpleNamespace(GetOutcome=self.cluster.answers.get_outcome),
            target=SimpleNamespace(GetCopy=self.cluster.answers.get_copy),
            gate=SimpleNamespace(
                Report=lambda request, timeout_s: called(gates.report, request),
                Detach=lambda request, timeout_s: called(members.detach, request, caller),
                NewId=lambda request, timeout_s: called(members.new_id, request, caller),
                Attach=lambda request, timeout_s: called(members.attach, request, caller),
                GiveUp=lambda request, timeout_s: called(members.give_up, request.move, caller),
                Open=lambda request, timeout_s: called(
                    gates.open, request.move, request.token, caller, abandoned=request.abandoned
                ),
            ),
        )


class _Client(SimpleNamespace):
    async def __aenter__(self) -> _Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


class Cluster:
    """Nodes a and b, and c, which has no rank of the job. Rank 0 is on a and moves to c; ranks 1 and 2 are on b."""

    def __init__(self, folder: Path, shims: Shims, processes: Iterator[Process]) -> None:
        self.shims = shims
        self.answers = Answers()
        self.nodes = {name: Here(name, self, folder / name) for name in "abc"}
        self.process = {rank: next(processes) for rank in range(3)}
        for rank, node in enumerate("abb"):
            process = self.process[rank]
            self.shims.comms[process] = {WORLD: [3, rank, "live"]}
            if rank < 2:
                self.shims.comms[process][PAIR] = [2, 1 - rank, "live"]
            self.nodes[node].entries.append(
                SimpleNamespace(
                    uid=f"job-{rank}",
                    job="job",
                    rank=rank,
                    user_id=ALICE,
                    away_node="",
                    role="home",
                    group=SimpleNamespace(pids=lambda pid=process.pid: [pid]),
                    to_proto=lambda at, uid=f"job-{rank}": pb.Rank(uid=uid, place=pb.Rank.HERE, at_node=at),
                )
            )

    @property
    def request(self) -> pb.MoveDescription:
        return pb.MoveDescription(
            move=MOVE,
            rank_uid="job-0",
            job="job",
            source_node="a",
            source_endpoint="a:7070",
            target_node="c",
            target_endpoint="c:7070",
            nonce=NONCE,
            user_id=ALICE,
        )

    def token(self, outcome: str) -> bytes:
        return rules.proof(NONCE, outcome, MOVE)

    async def close_all(self) -> None:
        for node in self.nodes.values():
            await node.gates.close(self.request)

    def begin(self, boot_id: str = "boot") -> Moving:
        """The move in the source's journal, as Begin leaves it."""
        begin = Begin(
            MOVE, "source", "job-0", "job", 0, "a", "a:7070", "c", "c:7070", NONCE.hex(), boot_id, 1.0, 30.0, ALICE
        )
        move_log = self.nodes["a"].journal.begin(begin)
        move_log.mark(Mark.BEGUN)
        return Moving(move_log, nodes=[pb.NodeAddresses(name=name, endpoint=f"{name}:7070") for name in "abc"])

    def pid(self, rank: int) -> int:
        return self.process[rank].pid

    def stop(self) -> None:
        for node in self.nodes.values():
            for moving in node.gates.moves.values():
                if moving.settling is not None:
                    moving.settling.cancel()


def end(process: Process) -> None:
    process.signal(9)
    while process.alive():
        pass


@pytest.fixture
def sleepers() -> Iterator[Iterator[Process]]:
    running = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield (Process.of(process.pid) for process in running)
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def shims(monkeypatch: pytest.MonkeyPatch) -> Shims:
    shims = Shims()
    for name in ("reports", "read", "close", "open_gate", "set_targets", "detach", "new_id", "attach"):
        monkeypatch.setattr(ncclctl, name, getattr(shims, name))
    monkeypatch.setattr(ncclctl, "_has_gate", lambda process: True)
    return shims


@pytest.fixture
async def cluster(tmp_path: Path, shims: Shims, sleepers: Iterator[Process]) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path, shims, sleepers)
    yield made
    made.stop()
