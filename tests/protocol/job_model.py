"""The model of the daemons that suspend and resume a job: it serves the calls of `migrator/job_protocol.py`.

`job_world.py` has what they share; `job_coordinating.py`, `job_storing.py`, `job_restoring.py` and `job_gating.py` have the
roles.
"""

from __future__ import annotations

from contextlib import suppress

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Part
from snapshotd.moves.rules import Mark, target_answer
from tests.protocol.job_coordinating import Coordinating
from tests.protocol.job_restoring import Restoring
from tests.protocol.job_storing import Storing
from tests.protocol.job_world import NODES, Lost, Record, Refused


class JobModel(Coordinating, Storing, Restoring):
    """All participants together."""

    def on_part(self, node: str, move: str) -> object:
        record = self.journal.get((node, move))
        if record is None:
            return Part.ABSENT
        if record.kind == "copy":
            return job_rules.target_part(job_rules.copy_state(record.mark, whole=(node, move) in self.kept))
        if record.role == "target":
            if self.nccl and not record.attached and record.mark is Mark.HELD:
                return Part.WORKING
            return job_rules.target_part(target_answer(self.target_facts(record)))
        if record.ended:
            return Part.DONE
        exists = (node, move) in self.kept if record.kind == "snapshot" else record.copy_exists
        return job_rules.store_answer(record.mark, record.outcome, copy_exists=exists)

    def settle(self, rounds: int = 4) -> None:
        """Everything is there again, and no driver: leases expire, and every daemon settles what is open."""
        self.faults.clear()
        self.heal()
        for _ in range(rounds):
            for (node, move), record in list(self.journal.items()):
                record.lease = False
                if record.ended and not (record.mark is Mark.ACTIVATED and self.asleep(record)):
                    continue
                with suppress(Lost, Refused):
                    settles = {"job": self.settle_job, "source": self.settle_store, "target": self.settle_target}
                    settles["gate"] = self.settle_gate
                    settles[record.role](node, move)
            for node in NODES:
                with suppress(Lost, Refused):
                    self.renew(node)
                self.may_run(node)
            with suppress(Lost, Refused):
                self.settle_kept()

    def asleep(self, record: Record) -> bool:
        return record.copy is not None and record.copy.alive and (not record.copy.running or record.copy.gated)

    def unfinished(self) -> list[str]:
        return [f"{node} {move} {record}" for (node, move), record in self.journal.items() if not record.ended]

    def running(self) -> list[tuple[int, str]]:
        return sorted((copy.rank, copy.node) for copy in self.copies if copy.running)
