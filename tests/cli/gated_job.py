"""An NCCL job behind fake daemons: each rank is a list of NCCL calls with a gate like the shim's.

Every report lets each process run as far as its gate allows, so what the driver sees depends only on its own calls. A group
is a list of rows as the shim reports them: ("communicator", "c" | "s" | "r", rank in the communicator, count).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb

Row = tuple[str, str, int, int]
Group = list[Row]
Key = tuple[str, str, int]

LETTERS = {pb.ChannelCount.COLLECTIVE: "c", pb.ChannelCount.SEND: "s", pb.ChannelCount.RECEIVE: "r"}
KINDS = {letter: kind for kind, letter in LETTERS.items()}


def collective(comm: str) -> Group:
    return [(comm, "c", -1, 1)]


def send(comm: str, comm_rank: int) -> Group:
    return [(comm, "s", comm_rank, 1)]


def receive(comm: str, comm_rank: int) -> Group:
    return [(comm, "r", comm_rank, 1)]


@dataclass
class Gated:
    """One process. It launches `program` from index `at` on; None stands for user code that never ends."""

    rank: int
    memberships: dict[str, tuple[int, int]]  # communicator → (nranks, its rank there)
    program: Sequence[Group | None]
    at: int = 0
    pid: int = 100
    gate: str = "open"
    users: tuple[int, ...] = (7,)  # its threads; the first one waits at the gate
    refusals: dict[str, list[str]] = field(default_factory=dict)  # by communicator
    counts: dict[Key, int] = field(default_factory=dict)
    targets: dict[Key, int] = field(default_factory=dict)
    permissions: list[pb.Permission] = field(default_factory=list)
    passed: int = 0
    rdma: tuple[str, ...] = ()  # devices that NCCL has open

    def __post_init__(self) -> None:
        for group in self.program[: self.at]:
            self._count(group or [])

    @property
    def rank_uid(self) -> str:
        return f"train-{self.rank}-00000001"

    def _count(self, group: Group) -> None:
        for comm, kind, comm_rank, count in group:
            key = (comm, kind, comm_rank)
            self.counts[key] = self.counts.get(key, 0) + count

    def next_group(self) -> Group | None:
        return self.program[self.at] if self.at < len(self.program) else None

    def run(self) -> None:
        """Runs as far as the closed gate allows, by the rule of `migrator.quiesce.cut.may_launch`."""
        while (group := self.next_group()) is not None:
            keys = [(comm, kind, comm_rank) for comm, kind, comm_rank, _ in group]
            held = all(self.counts.get(k, 0) >= self.targets.get(k, 0) for k in keys) and not self._permitted()
            if self.gate == "closed" and held:
                return
            if self.gate == "open":
                return  # what a running job launches does not matter here
            self._count(group)
            self.at += 1
            self.passed += 1

    def _permitted(self) -> bool:
        return any(
            one.thread in (0, self.users[0])
            and self.passed < one.passed
            and self.counts.get((one.until.communicator, LETTERS[one.until.kind], one.until.peer), 0) < one.until.count
            for one in self.permissions
        )

    def take(self, told: pb.ProcessTargets) -> None:
        self.targets = {(each.communicator, LETTERS[each.kind], each.peer): each.count for each in told.targets}
        self.permissions = list(told.permissions)

    def shown(self) -> pb.ProcessGate:
        self.run()
        held = self.next_group() if self.gate == "closed" else None
        return pb.ProcessGate(
            rank_uid=self.rank_uid,
            rank=self.rank,
            pid=self.pid,
            communicators=[
                self._comm(comm, nranks, comm_rank) for comm, (nranks, comm_rank) in self.memberships.items()
            ],
            waiting=[pb.WaitingThread(thread=self.users[0], group=map(_row, held))] if held is not None else [],
            passed=self.passed,
            rdma=self.rdma,
        )

    def _comm(self, comm: str, nranks: int, comm_rank: int) -> pb.Communicator:
        counted = {
            kind: {comm_rank: n for (c, k, comm_rank), n in self.counts.items() if (c, k) == (comm, kind)}
            for kind in "sr"
        }
        return pb.Communicator(
            id=comm,
            nranks=nranks,
            rank=comm_rank,
            state="live",
            collectives=self.counts.get((comm, "c", -1), 0),
            sent=counted["s"],
            received=counted["r"],
            users=self.users,
            refusals=self.refusals.get(comm, ()),
        )


def _row(row: Row) -> pb.ChannelCount:
    comm, kind, peer, count = row
    return pb.ChannelCount(communicator=comm, kind=KINDS[kind], peer=peer, count=count)
