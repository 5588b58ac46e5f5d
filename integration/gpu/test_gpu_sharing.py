"""A job whose processes share device memory (CUDA IPC) runs under `migrator run` as without it. With `--device-memory
shared` it moves there and back, failed moves are undone, and it is snapshotted and rolled back; otherwise a move is refused.

The tensors are passed by torch, with the events that come with them. In the end both processes change what they share, and
what each finds is compared with an undisturbed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.drill import kill
from integration.gpu.gpu_jobs import PATIENCE_S, SOURCE, TARGET, measured, needs_cuda, record
from integration.harness import Cluster, Job, until
from integration.job_commands import ask
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500), needs_cuda()]

SHARING = str(Path(__file__).parents[1] / "workloads" / "gpu_sharing.py")
UNDONE = 11


@pytest.fixture(params=[False, True], ids=["files", "held"])
def sharing(nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """`held`: device memory stays on the GPU until it is sent."""
    with configured(nodes, (SOURCE, TARGET), {"hold_device_memory": request.param}):
        yield nodes


class Sharing:
    """The job, which waits until `end` exists."""

    def __init__(self, nodes: Cluster, device_memory: str) -> None:
        self.end = nodes.folder / f"sharing-{device_memory}-{time.monotonic_ns()}.end"
        self._command = [sys.executable, SHARING, "--until", str(self.end)]
        options = ["--device-memory", device_memory]
        name = f"sharing-{device_memory}"
        self.job: Job = nodes.start(SOURCE, self._command, job=name, env=dict(os.environ), options=options)
        until(
            "both have seen it", lambda: "READY" in self.job.lines() or self.job.process.poll() is not None, PATIENCE_S
        )
        assert "READY" in self.job.lines(), self.job.text()

    def ends_well(self) -> None:
        self.end.touch()
        code = self.job.finish(PATIENCE_S)
        assert code == 0, self.job.text()
        alone = subprocess.run(self._command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        self.end.unlink()
        assert self.job.lines() == alone.stdout.splitlines()


def test_rank_that_shares_device_memory_moves_there_and_back(sharing: Cluster) -> None:
    run, seen = Sharing(sharing, "shared"), {}
    for to in (TARGET, SOURCE):
        moved = sharing.move(run.job, to, timeout_s=PATIENCE_S)
        assert "close-shared" in {part["name"] for part in moved["parts"]}
        seen[to] = measured(moved)
    run.ends_well()
    record("sharing-moves", moves=seen)


def test_failed_moves_are_undone_and_a_retry_succeeds(sharing: Cluster) -> None:
    run = Sharing(sharing, "shared")
    points = [(SOURCE, Point.SHARED_CLOSED), (SOURCE, Point.OFFLOADED), (SOURCE, Point.CHECKPOINTED)]
    for node, point in [*points, (TARGET, Point.CUDA_RESTORED), (TARGET, Point.RESTORED)]:
        sharing.fault(node, point, "fail")
        result = sharing.move(run.job, TARGET, expect=UNDONE, timeout_s=PATIENCE_S)
        assert "fault injected" in result["reason"], (point, result["reason"])
    sharing.move(run.job, TARGET, timeout_s=PATIENCE_S)
    run.ends_well()


def test_rank_that_shares_device_memory_is_snapshotted_and_rolled_back(sharing: Cluster) -> None:
    run = Sharing(sharing, "shared")
    taken = ask(sharing, "snapshot", run.job.name)
    (rank,) = sharing.processes_of(str(run.end))
    kill(rank)
    back = ask(sharing, "rollback", run.job.name)
    run.ends_well()
    record("sharing-snapshot", snapshot=measured(taken), rollback=measured(back))


@pytest.mark.parametrize("device_memory", ["driver", "offload"])
def test_rank_that_was_started_as_usual_runs_and_is_refused(nodes: Cluster, device_memory: str) -> None:
    run = Sharing(nodes, device_memory)
    done = nodes.migrator("check", "--rank", "0", "--job", run.job.name, "--to", TARGET)
    run.ends_well()
    assert done.returncode != 0
    assert "gpu-ipc" in done.stdout + done.stderr
