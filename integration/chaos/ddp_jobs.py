"""An unmodified DistributedDataParallel job over gloo that is snapshotted and rolled back while it runs.

Its ranks make some steps again after a rollback, and each must give the same loss every time. Their launchers see every step
once. A launcher whose node is switched off takes the output of its rank with it; the ledger of that rank remains.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from integration.chaos.jobs import END_S, Broken, ChaosJob, Ledger
from integration.harness import WORKLOADS, Cluster, Job, until
from integration.torch_jobs import TorchLab

PACE_S = 0.2
WIDTH = "64"
_STEP = re.compile(r"step (\d+) loss (\S+)( sum \S+)?")
#: Undisturbed runs are made for so many steps more than needed, and used again.
_AHEAD = 500
_ports = iter(range(30100, 32700))


class RepeatedLedger(Ledger):
    """The steps of one rank. They may begin again at an earlier one, with the same losses; none is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.losses: list[str] = []
        self._next = 0  # a later step shows that another copy has made those in between

    def read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            self._add(line.decode(errors="replace"))
        self.steps = len(self.losses)

    def _add(self, line: str) -> None:
        number, _, loss = line.partition(" ")
        if not number.isdigit() or int(number) > self._next:
            raise Broken(f"{self.path.name}: step {line!r} instead of {self._next} or an earlier one")
        step = int(number)
        self._next = step + 1
        if step == len(self.losses):
            self.losses.append(loss)
        elif self.losses[step] != loss:
            raise Broken(f"{self.path.name}: step {step} has the loss {loss}, and had {self.losses[step]} before")


class Undisturbed:
    """What the ranks of an undisturbed run print, by the size of the job."""

    def __init__(self, nodes: Cluster) -> None:
        self._lab = TorchLab(nodes)
        self._known: dict[int, list[list[str]]] = {}

    def lines(self, world: int, steps: int) -> list[list[str]]:
        """The lines of each rank, of which the sum at the end may be left out."""
        if len(self._known.get(world, [[]])[0]) < steps:
            asked = ("--steps", str(steps + _AHEAD), "--late-group-at", "0", "--pace-s", "0", "--width", WIDTH)
            found = self._lab.undisturbed("ddp.py", *asked, world=world)
            self._known[world] = [sorted(lines, key=lambda line: int(line.split()[1])) for lines in found]
        return [lines[:steps] for lines in self._known[world]]


class Ddp(ChaosJob):
    """Rank 0 hosts the store. `lost`: ranks whose launchers ended with their nodes."""

    kind = "ddp"
    ledger_kind = RepeatedLedger

    def __init__(self, nodes: Cluster, homes: list[str], undisturbed: Undisturbed) -> None:
        self.undisturbed, self.lost = undisturbed, set[int]()
        super().__init__(nodes, homes)

    def start(self) -> list[Job]:
        world = {
            "WORLD_SIZE": len(self.homes),
            "MASTER_ADDR": self.nodes.lab.address(self.homes[0]),
            "MASTER_PORT": next(_ports),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        program = [sys.executable, "-u", str(WORKLOADS / "ddp.py"), "--until", str(self.end_file), "--width", WIDTH]
        program += ["--pace-s", str(PACE_S)]
        started = []
        for rank, home in enumerate(self.homes):
            environment = [f"{name}={value}" for name, value in {**world, "RANK": rank}.items()]
            command = ["env", *environment, *program, "--witness", self.marker(rank)]
            with self.errors(rank).open("wb") as errors:
                started.append(self.nodes.start(home, command, rank=rank, job=self.name, stderr=errors))
        return started

    def errors(self, rank: int) -> Path:
        return self.nodes.folder / f"{self.name}-{rank}.err"

    def expected(self, steps: int) -> list[list[str]]:
        return self.undisturbed.lines(len(self.homes), steps)

    def ended(self) -> bool:
        return any(job.process.poll() is not None for rank, job in enumerate(self.ranks) if rank not in self.lost)

    def node_is_off(self, node: str) -> None:
        """The launchers there have ended, and with them what they would have printed."""
        self.lost |= {rank for rank, home in enumerate(self.homes) if home == node}

    def tails(self) -> str:
        said = [f"--- {self.errors(rank).name}\n{self.errors(rank).read_text()[-1500:]}" for rank in self._numbers]
        return "\n".join([super().tails(), *said])

    @property
    def _numbers(self) -> Sequence[int]:
        return range(len(self.ranks))

    def end(self) -> None:
        """Lets the job end. Every launcher that is left saw each step once, with the loss of an undisturbed run."""
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
        expected = self.expected(steps)
        for number, (rank, ledger) in enumerate(zip(self.ranks, self.ledgers, strict=True)):
            assert isinstance(ledger, RepeatedLedger)
            name, whole = f"rank {number} of {self.name}", complete and number not in self.lost
            wanted = expected[number]
            losses = [line.split()[3] for line in wanted]
            if ledger.losses != losses[: ledger.steps] or (complete and ledger.steps != steps):
                raise Broken(f"{name} made {ledger.steps} steps of {steps}, or with other losses: {ledger.path}")
            *lines, rest = rank.text().split("\n")
            if whole and (lines[-1:] != ["DONE"] or rest):
                raise Broken(f"{name} ended with {lines[-1:]} {rest!r}")
            printed = [line for line in lines if line != "DONE"]
            if whole and len(printed) != steps:
                raise Broken(f"{name} made {steps} steps and printed {len(printed)} lines")
            for line, correct in zip(printed, wanted, strict=False):
                if not _STEP.fullmatch(line) or line not in {correct, correct.partition(" sum ")[0]}:
                    raise Broken(f"{name} printed {line!r} instead of {correct!r}")

    def remove(self) -> None:
        super().remove()
        for rank in self._numbers:
            self.errors(rank).unlink(missing_ok=True)
