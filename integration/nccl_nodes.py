"""Jobs on the fake NCCL in the lab: every rank is protected, and its output is compared with that of an undisturbed run.

On nodes with fake GPUs the ranks can also have device memory, which the shim offloads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from integration.harness import PATIENCE_S, WORK, WORKLOADS, Cluster, Job, until
from snapshotd.moves.journal import Journal
from snapshotd.moves.rules import Mark
from tests.fakes import verbs_fake
from tests.fakes.cuda_fake import GpuNode, gpus

SOURCES = Path(__file__).parents[1] / "tests" / "fakes" / "nccl"
#: A library other than NCCL that opens an RDMA device.
FOREIGN = "libforeign.so"
PROGRAM = (sys.executable, str(WORKLOADS / "nccl_steps.py"))


@cache
def library_dir() -> Path:
    """Builds the fake once, in a folder that all nodes of the lab see under the same path."""
    folder = WORK / "nccl" / "library"
    made = subprocess.run(["make", "-C", SOURCES, "-j2", f"BUILD={folder}"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@cache
def verbs_dir() -> Path:
    """The same for the fake libibverbs."""
    folder = WORK / "nccl" / "verbs"
    made = subprocess.run(["make", "-C", verbs_fake.SOURCES, f"BUILD={folder}"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@contextlib.contextmanager
def rdma_devices(nodes: Cluster, count: int = 2) -> Iterator[None]:
    """So many RDMA devices on every node: files in a folder that only the node sees."""

    def everywhere(script: str) -> None:
        for node in nodes.lab.nodes:
            with nodes.lab.spawn(node, ["sh", "-c", script, "sh", str(count)]) as running:
                assert running.wait(PATIENCE_S) == 0, node

    everywhere(verbs_fake.MAKE_DEVICES)
    try:
        yield
    finally:
        everywhere(f"umount --lazy {verbs_fake.FOLDER}")


def rdma_of(pid: int) -> list[str]:
    """The RDMA devices that a process has open or mapped."""
    names = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(each))
    names += [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sorted(name for name in names if name.startswith(verbs_fake.FOLDER))


def _meeting() -> Path:
    (WORK / "nccl").mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="meeting-", dir=WORK / "nccl"))


@cache
def undisturbed(shape: str, ranks: int, steps: int, device_mib: int = 0) -> tuple[list[str], ...]:
    """The lines that each rank prints in `steps` steps where nothing moves and nothing is preloaded."""
    meeting = _meeting()
    folders = [str(library_dir()), *([GpuNode(meeting / "gpu", gpus("alone")).library_dir] if device_mib else [])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    # Files, not pipes: a rank whose pipe is full would wait, and the others for it.
    outputs = [meeting / f"out-{rank}" for rank in range(ranks)]
    running = []
    try:
        for rank, out in enumerate(outputs):
            command = [*PROGRAM, *_arguments(meeting, shape, rank, ranks, steps, 0.0, device_mib)]
            with out.open("wb") as file:
                running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()
    texts = tuple(out.read_text() for out in outputs)
    shutil.rmtree(meeting)
    assert all(text.endswith("DONE\n") for text in texts), texts
    return tuple(text.splitlines()[:-1] for text in texts)


def _arguments(
    meeting: Path, shape: str, rank: int, ranks: int, steps: int, pace_s: float, device_mib: int
) -> list[str]:
    given = {"meeting": meeting, "rank": rank, "ranks": ranks, "shape": shape, "steps": steps, "pace-s": pace_s}
    given["device-mib"] = device_mib
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@dataclass
class NcclJob:
    """One job whose rank r starts on `places[r]`."""

    nodes: Cluster
    places: Sequence[str]
    shape: str = "world"
    pace_s: float = 0.02
    stuck: tuple[int, int] | None = None  # (rank, step): that rank waits before that step for the file `go`
    gpus: Mapping[str, GpuNode] | None = None  # by node; every rank then has device memory
    device_mib: int = 0
    buffer_mib: int = 0  # of each communicator, on the device
    witnesses: Sequence[Path] = ()  # of each rank: the file to which it appends its steps
    errors: Sequence[Path] = ()  # of each rank: the file that gets its stderr, instead of that of its output
    environment: Sequence[str] = ()  # more variables, as NAME=VALUE
    name: str = ""
    rdma: bool = False  # NCCL communicates through RDMA devices (see `rdma_devices`)
    ranks: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meeting = _meeting()
        name = self.name or f"nccl{time.monotonic_ns() % 10**9}"
        for rank, node in enumerate(self.places):
            count = len(self.places)
            words = _arguments(self.meeting, self.shape, rank, count, 1_000_000, self.pace_s, self.device_mib)
            folders = [str(library_dir()), *([self.gpus[node].library_dir] if self.gpus else [])]
            if self.rdma:
                folders.append(str(verbs_dir()))
                words += ["--beside", str(verbs_dir() / FOREIGN)]
            environment = [
                f"LD_LIBRARY_PATH={':'.join(folders)}",
                f"FAKE_NCCL_FAULT_FILE={self._faults(rank)}",
                f"FAKE_NCCL_BUFFER_MIB={self.buffer_mib}",
                *self.environment,
                *(["FAKE_NCCL_NET=IB"] if self.rdma else []),
            ]
            self._faults(rank).touch()
            if self.witnesses:
                words += ["--witness", str(self.witnesses[rank])]
            if self.stuck is not None:
                words += ["--stuck-at", str(self.stuck[1]), *(["--stuck"] if rank == self.stuck[0] else [])]
            command = ["env", *environment, *PROGRAM, *words]
            with contextlib.ExitStack() as stack:
                apart: dict[str, Any] = (
                    {"stderr": stack.enter_context(self.errors[rank].open("wb"))} if self.errors else {}
                )
                self.ranks.append(self.nodes.start(node, command, rank=rank, job=name, **apart))

    def _faults(self, rank: int) -> Path:
        return self.meeting / f"faults-{rank}"

    def fault(self, rank: int, entry: str) -> None:
        """Sets the fault of the fake in this rank's process (see tests/fakes/nccl/faults.c), or none if empty."""
        fresh = self.meeting / f"faults-{rank}.new"
        fresh.write_text(entry)
        fresh.rename(self._faults(rank))

    def open_beside_nccl(self, rank: int) -> None:
        """Makes another library in this rank open an RDMA device."""
        (self.meeting / f"beside-{rank}").touch()
        until("the device to be opened", (self.meeting / f"beside-{rank}-opened").exists)

    def slow_down(self, rank: int, node: str) -> None:
        """Makes a rank slow as long as it is on this node."""
        (self.meeting / f"slow-{rank}-{node}").touch()

    def await_lines(self, count: int) -> None:
        for rank in self.ranks:
            rank.await_lines(count)

    def await_progress(self, lines: int = 3) -> None:
        """Waits until every rank has printed so many more lines."""
        before = [len(rank.lines()) for rank in self.ranks]
        for rank, had in zip(self.ranks, before, strict=True):
            try:
                rank.await_lines(had + lines)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.nodes.logs()}") from None

    def ends_well(self, *, failed_once: bool = False) -> None:
        """Ends the job. The output of every rank is that of an undisturbed run, and nothing of the job is left. A job that
        has failed once, and was rolled back, has also reported NCCL's errors, and repeats what it printed before these."""
        self.await_progress()
        (self.meeting / "end").touch()
        for number, rank in enumerate(self.ranks):
            assert rank.finish() == 0, f"rank {number}: {rank.text()[-500:]}\n{self.nodes.logs()}"
        said = [rank.lines() for rank in self.ranks]
        if failed_once:
            # Not NCCL's errors, nor what the keeper says about the rollback.
            kept = [[line for line in lines if line[:1].isdigit() or line == "DONE"] for lines in said]
            said = [list(dict.fromkeys(lines)) for lines in kept]
        count = len(said[0]) - 1
        rounded = -(-count // 64) * 64  # so that one undisturbed run serves several jobs
        alone = undisturbed(self.shape, len(self.places), rounded, self.device_mib)
        for number, (lines, undisturbed_lines) in enumerate(zip(said, alone, strict=True)):
            assert lines == [*undisturbed_lines[:count], "DONE"], f"rank {number} of ranks with {count} lines"
        until(f"nothing to be left\n{self.nodes.logs()}", lambda: not self._left())
        shutil.rmtree(self.meeting, ignore_errors=True)

    def _left(self) -> list[str]:
        return [*self.nodes.leftovers(), *unsettled(self.nodes)]


def unsettled(nodes: Cluster) -> list[str]:
    """Unfinished moves and closed gates in the journals of all nodes."""
    found = []
    for node in nodes.lab.nodes:
        folder = nodes.lab.layout.state / node
        found += [f"{node} {log.move} {log.last_mark}" for log in Journal(folder).all() if not log.ended_unix_s]
        gates = Journal(folder / "gate").all() if (folder / "gate").exists() else []
        found += [f"{node} gate of {log.move}" for log in gates if log.last_mark is not Mark.SETTLED]
    return found
