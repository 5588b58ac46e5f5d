"""The stores of the model of jobs. The decisions are those of `snapshotd/moves/job_rules.py`."""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, StoreDecision, StoreFacts
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.job_gating import JobGating
from tests.protocol.job_world import Lost, Record, Refused, Unreadable


class Storing(JobGating):
    def on_begin(self, node: str, move: str, rank: str, coordinator: str, kind: str = "") -> object:
        if (node, move) in self.journal:
            self.open(node, move, "source", Mark.BEGUN)
            return None
        copy = next((c for c in self.copies if c.rank == int(rank) and c.node == node and c.running), None)
        if copy is None or any(r.copy is copy and not r.ended for r in self.journal.values()):
            raise Refused("no such rank, or busy")
        if copy.bound_to not in {"", self.begun_at[coordinator]}:
            raise Refused("another node coordinates its snapshots")
        self.event(node, "mark begun")
        self.journal[node, move] = Record("source", Mark.BEGUN, coordinator, rank=int(rank), copy=copy, kind=kind)
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
            assert record.copy is not None
            assert not self.nccl or not record.copy.comm, "an image has a communicator"
            if record.kind == "snapshot":
                self.kept[node, move] = record.coordinator, record.rank
            else:
                self.images[node, move] = record.rank
            self.put(node, record, Mark.STREAMED)
        if record.kind == "snapshot":
            self.settle_store(node, move)
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

    def settle_store(self, node: str, move: str) -> None:
        record = self.journal[node, move]
        for _ in range(3):
            if record.ended:
                return
            waits = record.kind == "snapshot" and record.mark is Mark.STREAMED and not record.continued
            said = self.ask(node, record) if record.outcome is None and not waits else Answer.UNDECIDED
            facts = StoreFacts(
                mark=record.mark,
                outcome=record.outcome,
                copy_exists=record.copy_exists,
                interrupted=self.interrupted(node, record),
                lease_expired=not record.lease,
                coordinator=said,
                snapshot=record.kind == "snapshot",
                continued=record.continued,
            )
            match job_rules.store_next(facts)[0]:
                case StoreDecision.RECORD_ABORT:
                    self.decide(node, record, Outcome.ABORT)
                case StoreDecision.RECORD_COMMIT:
                    self.decide(node, record, Outcome.COMMIT)
                case StoreDecision.THAW:
                    self.event(node, "drop the image")
                    self.images.pop((node, move), None)
                    self.kept.pop((node, move), None)
                    self.event(node, "thaw")
                    if record.copy is not None and record.copy.alive:
                        record.copy.running = True
                    self.put(node, record, Mark.SETTLED)
                case StoreDecision.CONTINUE:
                    self.event(node, "go on")
                    if record.copy is not None and record.copy.alive:
                        record.copy.running = True
                    self.event(node, "mark continued")
                    record.continued = True
                case StoreDecision.KEEP:
                    if record.copy is not None and record.copy.alive:
                        record.copy.bound_to = self.coordinator_of(record)
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
        if record is not None and record.kind and record.continued and (node, move) in self.kept:
            return None
        if record is None or not record.ended or (node, move) not in {**self.images, **self.kept}:
            raise Refused("no such image")
        return None

    def on_send(self, node: str, image: str, target: str, move: str) -> object:
        self.on_get_image(node, image)
        if self.unreadable.get((node, image)) == "send":
            raise Unreadable(f"{image} on {node}")
        if (node, image) in self.stuck:
            raise Refused(f"{image} on {node} did not reach {target}")
        try:
            self.call(node, target, "seal", move)
        except Lost as lost:
            raise Refused("the target does not answer") from lost
        return None

    def on_drop(self, node: str, image: str) -> object:
        self.event(node, "drop the image")
        self.images.pop((node, image), None)
        self.kept.pop((node, image), None)
        return None

    def settle_kept(self) -> None:
        """Nodes ask whether the images of snapshots that they keep are still needed."""
        for node, move in list(self.kept):
            record = self.journal[node, move]
            at = self.images_follow.get((node, move), self.coordinator_of(record))
            known = self.journal.get((at, record.coordinator))
            with suppress(Lost, Refused):
                self.call(node, at, "job_outcome", record.coordinator)
                if record.ended and (known is None or known.dropped):
                    self.on_drop(node, move)
