"""The jobs that are moved, each with a ledger of the steps that its ranks have made.

Every rank appends each step to its ledger, a file that it opens by name each time. A copy that ran even for a moment too
much leaves its steps there, although its output reaches no reader.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random

from integration.chaos.processes import with_marker
from integration.drill import node_of
from integration.harness import PATIENCE_S, WORKLOADS, Cluster, Job, until
from integration.nccl_nodes import NcclJob, undisturbed
from tests.fakes.cuda_fake import GpuNode

#: Takes one line about what happens.
Say = Callable[[str], None]

#: The fake GPUs of the nodes.
Gpus = Mapping[str, GpuNode]

_numbers = itertools.count(1)
_STEP = re.compile(r"(step )?\d+ [0-9a-f]{16,24}")
#: For the end of a job, on a machine with other work.
END_S = 2 * PATIENCE_S


class Broken(AssertionError):
    """A promise of the product was broken."""


class Ledger:
    """The steps of one rank, in the order in which they were made."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, 0
        self._position, self._rest = 0, b""
        path.unlink(missing_ok=True)
        path.touch()

    def read(self) -> None:
        """Reads what was appended. Raises Broken if a step was made twice, or was left out."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            if line.partition(b" ")[0] != b"%d" % self.steps:
                raise Broken(f"{self.path.name}: step {line.decode(errors='replace')!r} after {self.steps} steps")
            self.steps += 1


class ChaosJob(ABC):
    """A job whose rank r begins on `homes[r]`."""

    kind = ""
    #: Whether a copy that is held may be continued, with all threads of the job parked (snapshotd/moves/nccl/held_copy.py).
    held_copy_runs = False
    ledger_kind = Ledger

    def __init__(self, nodes: Cluster, homes: list[str], gpus: Gpus | None = None) -> None:
        self.nodes, self.homes, self.gpus = nodes, homes, gpus
        self.name = f"{self.kind}{next(_numbers)}"
        self.end_file = nodes.folder / f"{self.name}.end"
        self.end_file.unlink(missing_ok=True)
        self.ledgers = [self.ledger_kind(nodes.folder / f"{self.name}-{rank}.ledger") for rank in range(len(homes))]
        self.rounds = 0
        self.ranks = self.start()

    @abstractmethod
    def start(self) -> list[Job]:
        """Starts all ranks."""

    @abstractmethod
    def expected(self, steps: int) -> list[list[str]]:
        """The lines that each rank of an undisturbed run prints in so many steps."""

    def ask_to_end(self) -> None:
        self.end_file.touch()

    def marker(self, rank: int) -> str:
        """Found in the command line of each copy of a rank, and of no other process."""
        return str(self.ledgers[rank].path)

    def copies(self, rank: int) -> list[int]:
        return with_marker(self.nodes, self.marker(rank))

    def places(self, rank: int) -> list[str]:
        return [node_of(pid) for pid in self.copies(rank)]

    def ended(self) -> bool:
        return any(rank.process.poll() is not None for rank in self.ranks)

    def await_steps(self, more: int = 3) -> None:
        wanted = [ledger.steps + more for ledger in self.ledgers]

        def enough() -> bool:
            if self.ended():
                raise Broken(f"{self.name} has ended:\n{self.tails()}")
            for ledger in self.ledgers:
                ledger.read()
            return all(ledger.steps >= steps for ledger, steps in zip(self.ledgers, wanted, strict=True))

        until(f"steps of {self.name}", enough, END_S)

    def tails(self) -> str:
        left = [rank for rank in self.ranks if rank.out.exists()]
        return "\n".join(f"--- {rank.out.name}\n{rank.text()[-1000:]}" for rank in left)

    # ---------------------------------------------------------------- the end

    def end(self) -> None:
        """Ends the job. Its output is that of an undisturbed run."""
        self.ask_to_end()
        for number, rank in enumerate(self.ranks):
            if (status := rank.finish(END_S)) != 0:
                raise Broken(f"rank {number} of {self.name} ended with {status}:\n{self.tails()}")
        self.verify(complete=True)
        self.remove()

    def abandon(self) -> None:
        """Ends a job of which a rank was killed. No copy stays, and nothing that was printed is wrong."""
        for rank in self.ranks:
            rank.kill()
        for number in range(len(self.ranks)):
            try:
                until("no copy", partial(self._no_copy, number), END_S)
            except AssertionError:
                raise Broken(f"rank {number} of {self.name} has copies, and its keeper was killed") from None
        self.verify(complete=False)
        self.remove()

    def _no_copy(self, rank: int) -> bool:
        return not self.copies(rank)

    def verify(self, *, complete: bool) -> None:
        for ledger in self.ledgers:
            ledger.read()
        expected = self.expected(max(ledger.steps for ledger in self.ledgers))
        for number, (rank, ledger) in enumerate(zip(self.ranks, self.ledgers, strict=True)):
            # Without the last one, which may be half a line, and without complaints about a peer that was killed.
            lines = [line for line in rank.text().split("\n")[:-1] if _STEP.fullmatch(line)]
            if complete and len(lines) != ledger.steps:
                raise Broken(f"rank {number} of {self.name} made {ledger.steps} steps and printed {len(lines)} lines")
            for line, wanted in zip(lines, expected[number], strict=False):
                if line != wanted:
                    raise Broken(f"rank {number} of {self.name} printed {line!r} instead of {wanted!r}")

    def remove(self) -> None:
        for ledger in self.ledgers:
            ledger.path.unlink(missing_ok=True)
        for rank in self.ranks:
            if rank in self.nodes.jobs:
                self.nodes.jobs.remove(rank)
            rank.out.unlink(missing_ok=True)


class Single(ChaosJob):
    """One process without connections."""

    kind = "single"

    def start(self) -> list[Job]:
        witness = ("--witness", self.marker(0), "--pace-s", "0.05")
        return [self.nodes.workload(self.homes[0], "chain.py", *witness, job=self.name)]

    def ask_to_end(self) -> None:
        self.ranks[0].process.send_signal(signal.SIGTERM)

    def expected(self, steps: int) -> list[list[str]]:
        lines, state = [], b""
        for step in range(steps):
            state = hashlib.sha256(state).digest()
            lines.append(f"step {step} {state.hex()[:16]}")
        return [lines]


class Gloo(ChaosJob):
    """Ranks that are connected with each other and with a store."""

    kind = "gloo"

    def start(self) -> list[Job]:
        world = {
            "WORLD_SIZE": len(self.homes),
            "MASTER_ADDR": self.nodes.lab.address(self.homes[0]),
            "MASTER_PORT": 29600 + next(_numbers) % 1000,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        program = [sys.executable, str(WORKLOADS / "gloo_chain.py"), "--until", str(self.end_file)]
        started = []
        for rank, home in enumerate(self.homes):
            environment = [f"{name}={value}" for name, value in {**world, "RANK": rank}.items()]
            command = ["env", *environment, *program, "--witness", self.marker(rank)]
            started.append(self.nodes.start(home, command, rank=rank, job=self.name))
        return started

    def expected(self, steps: int) -> list[list[str]]:
        states = [hashlib.sha256(b"%d" % rank).digest() for rank in range(len(self.homes))]
        lines: list[list[str]] = [[] for _ in states]
        for step in range(steps):
            total = sum(int.from_bytes(state[:4], "big") for state in states)
            states = [hashlib.sha256(state + b"%d" % total).digest() for state in states]
            for of_rank, state in zip(lines, states, strict=True):
                of_rank.append(f"step {step} {state.hex()[:16]}")
        return lines


class Nccl(ChaosJob):
    """Ranks that use NCCL; the library is the fake of tests/fakes/nccl."""

    kind = "nccl"
    held_copy_runs = True
    device_mib = 0

    def start(self) -> list[Job]:
        self.job = NcclJob(
            self.nodes,
            self.homes,
            pace_s=0.1,
            gpus=self.gpus if self.device_mib else None,
            device_mib=self.device_mib,
            witnesses=[ledger.path for ledger in self.ledgers],
        )
        self.name = self.job.ranks[0].name
        return self.job.ranks

    def ask_to_end(self) -> None:
        (self.job.meeting / "end").touch()

    def expected(self, steps: int) -> list[list[str]]:
        return list(undisturbed("world", len(self.homes), -(-steps // 256) * 256, self.device_mib))


class NcclGpu(Nccl):
    """The same with device memory, on fake GPUs."""

    kind = "nccl-gpu"
    device_mib = 4


def draw(kind: str, nodes: Cluster, random: Random, gpus: Gpus | None = None) -> ChaosJob:
    """Starts a job of a kind on nodes that are drawn."""
    made = _KINDS[kind]
    return made(nodes, random.sample(nodes.lab.nodes, 1 if made is Single else 2), gpus)


_KINDS: dict[str, type[ChaosJob]] = {made.kind: made for made in (Single, Gloo, Nccl, NcclGpu)}
#: Without and with fake GPUs.
KINDS, ALL_KINDS = (Single.kind, Gloo.kind, Nccl.kind), tuple(_KINDS)
