"""Starts the jobs of the GPU suite, in a lab and undisturbed, and compares their output.

Invariant: a job is compared with an undisturbed run of the same flags, line by line and bit by bit. DEVICE=cpu runs the
suite on a machine without a GPU; tests that need the CUDA driver are then skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from integration.drill import node_of
from integration.harness import WORKLOADS, Cluster, Job, processes_of, until

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("SNAPSHOT_GPU_OUT") or ROOT / "out")
SOURCE, TARGET, OTHER = "node-1", "spare-1", "node-2"
TRAIN, GPT = str(WORKLOADS / "gpu_train.py"), str(WORKLOADS / "gpu_gpt.py")
SKIPPED = 77
GIB = 1 << 30
#: How device memory is moved where a test does not specify it. The whole suite runs with either value.
DEVICE_MEMORY = os.environ.get("SNAPSHOT_GPU_MEMORY", "offload")
RUN_OPTIONS = ("--device-memory", DEVICE_MEMORY)
#: The maximum number of steps of a job. Its undisturbed run always does as many.
STEPS, PACE_S = (3000, 0.01) if ON_GPU else (1000, 0.05)
#: How long tests wait for anything. No test passes or fails by the clock: this only ends tests that hang.
PATIENCE_S = 180.0
_KINDS = ("step ", "digest ", "DONE")


# ---------------------------------------------------------------- requirements and results


@cache
def why_not() -> str:
    """Why this suite cannot run here; empty if it can. Another process loads torch, so that this one stays without CUDA."""
    if not ON_GPU:
        return ""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver here ({error}); DEVICE=cpu runs the same jobs without a GPU"
    ask = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name(0) or '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        return f"torch does not load: {done.stderr.strip().splitlines()[-1:]}"
    return "" if done.stdout.strip() else "torch.cuda.is_available() is False"


def needs_gpu() -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def needs_cuda() -> pytest.MarkDecorator:
    """Marks a test that needs the CUDA driver, so is skipped with DEVICE=cpu."""
    reason = why_not() or ("" if ON_GPU else "this is about the CUDA driver, and DEVICE is cpu")
    return pytest.mark.skipif(bool(reason), reason=reason or "-")


def record(test: str, **measured: Any) -> None:
    """Appends one result to gpu-results.jsonl, for RESULTS.md."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "gpu-results.jsonl").open("a") as file:
        file.write(json.dumps({"test": test, "device": DEVICE, "at_unix_s": round(time.time(), 1), **measured}) + "\n")


def measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the answer of `migrator move --json` that are recorded."""
    names = ("outcome", "pause_s", "bytes", "device_bytes", "device_bytes_left", "reason", "error")
    kept = {name: result[name] for name in names if result.get(name)}
    kept["phases"] = {phase["name"]: phase["seconds"] for phase in result.get("phases", [])}
    kept["parts"] = {part["name"]: part["seconds"] for part in result.get("parts", [])}
    return {name: value for name, value in kept.items() if value}


def hold_device_memory(nodes: Cluster, names: Sequence[str], *, on: bool, hand_over: bool = False) -> None:
    """Sets whether device memory stays on the GPU until it is sent, and restarts the daemons. With `hand_over` it is not sent
    between nodes that share a GPU, as all of a lab do here: nothing that measures a transfer may set it."""
    keys = {"hold_device_memory": on, "hand_over_device_memory": hand_over}
    for node in names:
        nodes.configure(node, keys)


# ---------------------------------------------------------------- undisturbed runs


@dataclass(frozen=True)
class Said:
    code: int
    lines: list[str]
    text: str


class Undisturbed:
    """Runs of the same jobs without `migrator run`, started in advance, a few at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 3)))
        self._runs: dict[tuple[str, ...], Future[Said]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = False

    def want(
        self, flags: Sequence[str], environment: Mapping[str, str] | None = None, program: str = TRAIN
    ) -> Future[Said]:
        key = (program, *flags)
        if key not in self._runs:
            self._runs[key] = self._pool.submit(self._run, len(self._runs), key, dict(environment or {}))
        return self._runs[key]

    def _run(self, number: int, command: tuple[str, ...], environment: dict[str, str]) -> Said:
        out = self.folder / f"undisturbed-{os.getpid()}-{number}.out"
        with out.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, command[0], "--pace-s", "0", *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._processes.append(process)
        if self._ended:
            process.kill()
        code = process.wait()
        text = out.read_text(errors="replace")
        out.unlink()
        return Said(code, said(text), text)

    def settled(self) -> None:
        """Waits until all runs have ended, before something that would disturb them."""
        for run in self._runs.values():
            run.result()

    def end(self) -> None:
        self._ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._pool.shutdown()


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(_KINDS)]


# ---------------------------------------------------------------- jobs in the lab


@dataclass
class Training:
    """One gpu_train.py, or another program, under `migrator run`, which ends when `end` exists."""

    cluster: Cluster
    job: Job
    end: Path
    flags: tuple[str, ...]
    seed: int = field(default_factory=lambda: int(os.environ.get("SNAPSHOT_GPU_SEED", "0")) or time.time_ns() % 2**31)

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        name: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        device_memory: str = DEVICE_MEMORY,
        program: str = TRAIN,
    ) -> Training:
        end = cluster.folder / f"{name}-{time.monotonic_ns()}.end"
        command = [sys.executable, program, "--pace-s", str(PACE_S), "--until", str(end), *flags]
        env = {**os.environ, **(environment or {})}
        job = cluster.start(SOURCE, command, job=name, env=env, options=["--device-memory", device_memory])
        return cls(cluster, job, end, tuple(flags))

    def steps(self) -> int:
        return sum(line.startswith("step ") for line in self.job.lines())

    def await_steps(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        def enough() -> bool:
            ended = self.job.process.poll()
            if ended is not None and self.steps() < count:
                raise AssertionError(f"it ended with {ended}:\n{self.job.text()[-3000:]}\n{self.cluster.logs()}")
            return self.steps() >= count

        try:
            until(f"step {count} of {self.job.name}", enough, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is at {self.steps()}\n{self.cluster.logs()}") from None

    def await_progress(self, steps: int = 20, timeout_s: float = PATIENCE_S) -> None:
        """Waits until the job has done so many more steps."""
        self.await_steps(self.steps() + steps, timeout_s)

    def await_moment(self) -> int:
        """Waits for a random moment in the middle of the run; returns the number of steps by then."""
        chance = random.Random(self.seed)
        self.await_steps(chance.randint(20, 70))
        time.sleep(chance.uniform(0, 2 * PACE_S))
        return self.steps()

    def move(self, to: str) -> dict[str, Any]:
        return self.cluster.move(self.job, to, timeout_s=PATIENCE_S)

    def pid(self, node: str = SOURCE) -> int | None:
        """The job's first process on a node (workers that it forked have the same command line)."""
        found = [pid for pid in processes_of(str(self.end)) if node_of(pid) == node]
        return min(found, default=None, key=_started_ticks)

    def runs_on(self, node: str) -> None:
        """The job makes progress on this node, and no other node has a copy."""
        self.await_progress()
        places = {node_of(pid) for pid in processes_of(str(self.end))}
        assert places == {node}, f"copies on {places}\n{self.cluster.logs()}"

    def ends_as(self, alone: Future[Said]) -> int:
        """Ends the job. Its output is that of the undisturbed run, line by line. Returns the number of its steps."""
        self.end.touch()
        code = self.job.finish(PATIENCE_S)
        self.end.unlink(missing_ok=True)
        text = self.job.text()
        assert code == 0, f"it ended with {code}:\n{text[-3000:]}\n{self.cluster.logs()}"
        undisturbed = alone.result()
        assert undisturbed.code == 0, f"the undisturbed run ended with {undisturbed.code}:\n{undisturbed.text[-3000:]}"
        mine = said(text)
        assert mine[-1] == "DONE", mine[-3:]
        assert mine[-2].startswith("digest "), mine[-3:]
        theirs = undisturbed.lines[: len(mine) - 1]
        for own, other in zip(mine, theirs, strict=False):
            assert own == other, f"the first difference:\n  moved       {own}\n  undisturbed {other}"
        assert mine[:-1] == theirs, f"it said {len(mine)} lines, the undisturbed run {len(undisturbed.lines)}"
        return self.steps()


@contextlib.contextmanager
def undisturbed_runs(folder: Path) -> Iterator[Undisturbed]:
    folder.mkdir(parents=True, exist_ok=True)
    runs = Undisturbed(folder)
    try:
        yield runs
    finally:
        runs.end()


def _started_ticks(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 1 << 62
