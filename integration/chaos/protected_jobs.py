"""Jobs that are snapshotted and rolled back while they run.

Their ranks make some steps again after a rollback, and each must give the same result every time. Their launchers see every
step once. A launcher whose node is switched off takes the output of its rank with it; the ledger of that rank remains.
"""

from __future__ import annotations

import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from integration.chaos.jobs import END_S, Broken, ChaosJob, Gpus, Ledger
from integration.harness import Cluster, until


class RepeatedLedger(Ledger):
    """The steps of one rank. They may begin again at an earlier one, with the same results; none is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.results: list[str] = []
        self._next = 0  # a later step shows that another copy has made those in between

    def read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            self._add(line.decode(errors="replace"))
        self.steps = len(self.results)

    def _add(self, line: str) -> None:
        number, _, result = line.partition(" ")
        if not number.isdigit() or int(number) > self._next:
            raise Broken(f"{self.path.name}: step {line!r} instead of {self._next} or an earlier one")
        step = int(number)
        self._next = step + 1
        if step == len(self.results):
            self.results.append(result)
        elif self.results[step] != result:
            raise Broken(f"{self.path.name}: step {step} gave {result}, and {self.results[step]} before")


class ProtectedJob(ChaosJob):
    """`lost`: ranks whose launchers ended with their nodes."""

    ledger_kind = RepeatedLedger

    def __init__(self, nodes: Cluster, homes: list[str], gpus: Gpus | None = None) -> None:
        self.lost = set[int]()
        super().__init__(nodes, homes, gpus)

    @abstractmethod
    def result(self, line: str) -> str:
        """The result of a step, as in the ledger, of a line that a rank of an undisturbed run has printed."""

    @abstractmethod
    def is_right(self, line: str, undisturbed: str) -> bool:
        """Whether a rank may print this line for a step, in place of that of an undisturbed run."""

    def errors(self, rank: int) -> Path:
        """What the rank writes to stderr."""
        return self.nodes.folder / f"{self.name}-{rank}.err"

    def ended(self) -> bool:
        return any(job.process.poll() is not None for rank, job in enumerate(self.ranks) if rank not in self.lost)

    def node_is_off(self, node: str) -> None:
        """The launchers there have ended, and with them what they would have printed."""
        self.lost |= {rank for rank, home in enumerate(self.homes) if home == node}

    def tails(self) -> str:
        found = [self.errors(rank) for rank in self._numbers]
        said = [f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in found if path.exists()]
        return "\n".join([super().tails(), *said])

    @property
    def _numbers(self) -> Sequence[int]:
        return range(len(self.ranks))

    def end(self) -> None:
        """Lets the job end. Every launcher that is left saw each step once, with the result of an undisturbed run."""
        self.ask_to_end()
        for number, rank in enumerate(self.ranks):
            if number in self.lost:
                rank.process.wait(END_S)
                continue
            try:
                status = rank.finish(END_S)
            except subprocess.TimeoutExpired:
                raise Broken(f"rank {number} of {self.name} does not end\n{self.tails()}") from None
            if status != 0:
                raise Broken(f"rank {number} of {self.name} ended with {status}\n{self.tails()}")
        for number in self._numbers:
            until(f"the end of rank {number} of {self.name}", partial(self._no_copy, number), END_S)
        self.verify(complete=True)
        self.remove()

    def verify(self, *, complete: bool) -> None:
        for ledger in self.ledgers:
            ledger.read()
        steps = max(ledger.steps for ledger in self.ledgers)
        expected = [lines[:steps] for lines in self.expected(steps)]
        for number, (rank, ledger) in enumerate(zip(self.ranks, self.ledgers, strict=True)):
            assert isinstance(ledger, RepeatedLedger)
            name, whole = f"rank {number} of {self.name}", complete and number not in self.lost
            wanted = expected[number]
            results = [self.result(line) for line in wanted]
            if ledger.results != results[: ledger.steps] or (complete and ledger.steps != steps):
                raise Broken(f"{name} made {ledger.steps} steps of {steps}, or with other results: {ledger.path}")
            *lines, rest = rank.text().split("\n")
            if whole and (lines[-1:] != ["DONE"] or rest):
                raise Broken(f"{name} ended with {lines[-1:]} {rest!r}")
            printed = [line for line in lines if line != "DONE"]
            if whole and len(printed) != steps:
                raise Broken(f"{name} made {steps} steps and printed {len(printed)} lines")
            for line, correct in zip(printed, wanted, strict=False):
                if not self.is_right(line, correct):
                    raise Broken(f"{name} printed {line!r} instead of {correct!r}")

    def remove(self) -> None:
        super().remove()
        for rank in self._numbers:
            self.errors(rank).unlink(missing_ok=True)
