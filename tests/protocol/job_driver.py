"""The driver of the model of jobs: it goes through the tables of `migrator/job_protocol.py`, and can die at any call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from migrator.job_protocol import (
    RESUME,
    SNAPSHOT,
    SUSPEND,
    UNDO_RESUME,
    UNDO_SNAPSHOT,
    UNDO_SUSPEND,
    Asked,
    JobStep,
    index_of,
    undo_plan,
)
from migrator.jobs.places import goes_on, in_order
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.rules import Outcome
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import DRIVER, NODES, Died, Lost, Record, Refused, Unreadable

#: The buddies of each rank: one, and two.
BUDDIES = (("two",), ("one",))
TWO_BUDDIES = (("two", "spare"), ("one", "spare"))

#: The model's name of each call.
RPC = {
    "Source.Inspect": "",
    "Job.Begin": "job_begin",
    "Source.Begin": "begin",
    "Gate.Close": "close_gates",
    "Job.Detach": "job_detach",
    "Job.Attach": "job_attach",
    "Source.Freeze": "freeze",
    "Source.Stream": "stream",
    "Job.Commit": "job_commit",
    "Source.Release": "release",
    "Source.GetImage": "get_image",
    "Target.Examine": "",
    "Target.Prepare": "prepare",
    "Source.Send": "send",
    "Target.Restore": "restore",
    "Target.Activate": "activate",
    "Job.GetOutcome": "job_confirm",
    "Job.Abort": "job_abort",
    "Source.Abort": "abort",
    "Target.Discard": "discard",
}


class Attempt:
    """A driver that suspends or resumes the job."""

    def __init__(
        self,
        model: JobModel,
        name: str,
        suspension: str = "",
        to: Sequence[str] = ("one", "spare"),
        at: str = NODES[0],
        buddies: Sequence[Sequence[str]] = BUDDIES,
        unreadable: Collection[str] = (),
        unsent: Collection[str] = (),
    ) -> None:
        """`at`: the node that coordinates it. `unreadable`: images that an earlier attempt has found to be of no use.
        `unsent`: those that did not reach the target then."""
        self.unreadable, self.unsent, self.exhausted = set(unreadable), list(unsent), False
        self.failed: list[tuple[int, str]] = []  # rank and image
        self.kept: dict[int, list[str]] = {}  # by rank
        self.model, self.name, self.suspension, self.at, self.buddies = model, name, suspension, at, buddies
        self.table, self.undo = (RESUME, UNDO_RESUME) if suspension else (SUSPEND, UNDO_SUSPEND)
        self.stores, self.moves = [node for _, node in model.running()], [f"{name}-0", f"{name}-1"]
        self.images: list[str] = []
        if suspension:
            known = model.journal[at, suspension]
            places = [self.place(known, rank) for rank in range(len(known.parts))]
            self.stores, self.images = [place[0] for place in places], [place[1] for place in places]
        self.nodes = list(to) if suspension else self.stores

    def place(self, known: Record, rank: int) -> tuple[str, str]:
        """Where the image of a rank is read: of a snapshot, a copy if the image is gone or of no use."""
        model, part = self.model, known.parts[rank]
        kept = [(part[0], part[1]), *(known.copies[rank] if known.copies else [])]
        answering = [node for node in NODES if model.up[node] and node not in model.cut]
        images = [pb.ImageCopy(node=node, move=move) for node, move in kept]
        self.kept[rank] = [move for _, move in kept]
        found = [(one.node, one.move) for one in in_order(images, answering, self.unreadable, self.unsent)]
        self.exhausted = self.exhausted or not found
        there = [one for one in found if one[0] in answering and (not known.copies or one in model.kept)]
        return (there or found or kept)[0]

    def copies(self, rank: int) -> list[tuple[str, str]]:
        """The buddies of a rank, and their moves."""
        return [(node, f"{self.name}-copy-{rank}-{node}") for node in self.buddies[rank]]

    def run(self) -> str:
        """done, undone, or "" if the driver died."""
        self.model.up[DRIVER] = True
        if self.exhausted:
            return "no image"
        reached = 0
        try:
            try:
                while reached < len(self.table):
                    self.ask(self.table[reached])
                    reached += 1
                return "done"
            except (Lost, Refused):
                return self.end(reached)
        except Died as died:
            if died.who == DRIVER:
                return ""
            raise

    def end(self, reached: int) -> str:
        if reached > index_of("Job.Commit", self.table):
            return ""
        try:
            outcome = self.model.call(DRIVER, self.at, "job_abort", self.name)
        except (Lost, Refused):
            return ""
        if outcome is Outcome.COMMIT:
            return ""
        for step in undo_plan(self.table, self.undo, reached):
            if step.call != "Job.Abort":
                self.ask(step, patient=True)
        return "undone"

    def ask(self, step: JobStep, *, patient: bool = False) -> None:
        if not (rpc := RPC[step.call]) or (step.only_with_nccl and not self.model.nccl):
            return
        if step.asked is Asked.COORDINATOR:
            parts = [
                f"{self.nodes[rank]} {self.moves[rank]} {self.stores[rank]} {(self.images or self.moves)[rank]}"
                + "".join(f" {node} {move}" for node, move in self.copies(rank) if self.table is SNAPSHOT)
                for rank in (0, 1)
            ]
            more = (self.suspension, *parts) if rpc == "job_begin" else ()
            try:
                self.model.call(DRIVER, self.at, rpc, self.name, *more)
            except (Lost, Refused):
                if not patient:
                    raise
            return
        bad: list[Lost | Refused] = []
        for rank, request in [(of, one) for of in (0, 1) for one in self.requests(step, rpc, of)]:
            try:
                self.model.call(DRIVER, *request)
            except Unreadable as error:
                self.unreadable.add(self.images[rank])
                self.failed.append((rank, self.images[rank]))
                bad.append(error)
            except (Lost, Refused) as error:
                if rpc == "send" and self.suspension and self.model.up[self.nodes[rank]]:
                    self.unsent.append(self.images[rank])
                    self.failed.append((rank, self.images[rank]))
                    bad.append(error)
                elif not patient:
                    raise
        if bad:
            raise bad[0]

    def requests(self, step: JobStep, rpc: str, rank: int) -> list[tuple[str, ...]]:
        if self.table is SNAPSHOT and rpc == "send":
            return [(self.stores[rank], rpc, self.moves[rank], *copy) for copy in self.copies(rank)]
        if step.asked is Asked.BUDDIES and rpc == "prepare":
            return [(node, "prepare_copy", move, str(rank), self.name) for node, move in self.copies(rank)]
        if step.asked is Asked.BUDDIES:
            return [(node, rpc, move) for node, move in self.copies(rank)]
        return [self.request(rpc, rank)]

    def request(self, rpc: str, rank: int) -> tuple[str, ...]:
        store, node, move = self.stores[rank], self.nodes[rank], self.moves[rank]
        match rpc:
            case "begin" if self.table is SNAPSHOT:
                return node, rpc, move, str(rank), self.name, "snapshot"
            case "begin":
                return node, rpc, move, str(rank), self.name
            case "close_gates":
                return node, rpc, self.name
            case "get_image":
                return store, rpc, self.images[rank]
            case "prepare":
                return node, rpc, move, str(rank), self.images[rank], self.name
            case "send":
                return store, rpc, self.images[rank], node, move
            case _:
                return node, rpc, move


class RollingBack:
    """A driver that rolls the job back, with rank 1 on the spare."""

    def __init__(self, model: JobModel, name: str, at: str = NODES[0], to: Sequence[str] = ("one", "spare")) -> None:
        self.model, self.name, self.at, self.to = model, name, at, to

    def run(self) -> str:
        self.model.up[DRIVER] = True
        try:
            return self._run()
        except (Lost, Refused):
            return "refused"
        except Died as died:
            if died.who == DRIVER:
                return ""
            raise

    def _run(self) -> str:
        model = self.model
        record = model.rolled_back(self.at)
        if not record:
            record = f"{self.name}-rollback"
            model.call(DRIVER, self.at, "job_rollback", record, model.snapshot())
        for _ in range(3):  # what the coordinator does without the driver
            if not model.journal[self.at, record].ended and model.up[self.at]:
                with suppress(Lost, Refused, Died):
                    model.settle_rollback(self.at, record)
            if not model.journal[self.at, record].ended:
                with suppress(Died):
                    model.pass_time()
        if not model.journal[self.at, record].ended:
            return "waits"
        return self._bring_back(record)

    def _bring_back(self, record: str) -> str:
        """As `migrator/jobs/resume.py`."""
        unreadable, unsent = set[str](), list[str]()
        while True:
            bad = len(unreadable) + len(unsent)
            name = f"{self.name}-resume" + (str(bad) if bad else "")
            attempt = Attempt(self.model, name, record, self.to, self.at, unreadable=unreadable, unsent=unsent)
            found = attempt.run()
            unreadable, unsent = attempt.unreadable, attempt.unsent
            if found != "undone" or not goes_on(attempt.failed, attempt.kept, unreadable, unsent):
                return found


class Protecting:
    """A driver that rolls the job back although its coordinator may be lost, which no operator has declared."""

    def __init__(self, model: JobModel, name: str) -> None:
        self.model, self.name = model, name

    def run(self) -> str:
        self.model.up[DRIVER] = True
        try:
            for again in range(3):
                with suppress(Lost, Refused):
                    if at := self._leader() or self._take_over():
                        found = RollingBack(self.model, f"{self.name}{again}", at, self._targets()).run()
                        if found in ("done", ""):
                            return found
                with suppress(Died):
                    self.model.pass_time()
            return "waits"
        except Died as died:
            if died.who == DRIVER:
                return ""
            raise

    def _answering(self) -> list[str]:
        return [node for node in NODES if self.model.up[node] and node not in self.model.cut]

    def _targets(self) -> list[str]:
        """Not the node that had the coordinator at first, if there is another one."""
        found = [node for node in self._answering() if node != NODES[0]] or [NODES[0]]
        return [found[0], found[-1]]

    def _leader(self) -> str:
        led = [node for node in self._answering() if self.model.led(node) and node not in self.model.lapsed]
        return led[0] if led else ""

    def _take_over(self) -> str:
        """As `migrator/jobs/succession.py`."""
        model, answering = self.model, self._answering()
        kept = [(node, move, of) for (node, move), of in model.kept.items() if node in answering]
        if {rank for _, _, (_, rank) in kept} != {0, 1}:
            raise Refused("no snapshot is left")
        node, move, (name, _) = next(one for one in kept if one[2][1] == 0)
        record = model.journal[node, move]
        former = model.images_follow.get((node, move), model.coordinator_of(record))
        if former in answering:
            raise Refused("its coordinator answers")
        model.call(DRIVER, node, "adopt", name, former, " ".join(model.journal[former, name].voters))
        for other in NODES:
            with suppress(Lost):
                model.call(DRIVER, other, "succeed", name, former, node)
        return node


class Taking(Attempt):
    """A driver that takes a snapshot."""

    def __init__(self, model: JobModel, name: str, buddies: Sequence[Sequence[str]] = BUDDIES) -> None:
        super().__init__(model, name, buddies=buddies)
        self.table, self.undo = SNAPSHOT, UNDO_SNAPSHOT
