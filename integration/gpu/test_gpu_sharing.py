"""A job whose processes share device memory (CUDA IPC) runs under `migrator run` as without it. With `--device-memory
shared`, and the setting on both nodes, it moves there and back; otherwise a move is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.gpu.gpu_jobs import PATIENCE_S, SOURCE, TARGET, hold_device_memory, needs_cuda
from integration.harness import Cluster, Job, until

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_cuda()]

SHARING = str(Path(__file__).parents[1] / "workloads" / "gpu_sharing.py")


def _begun(nodes: Cluster, end: Path, device_memory: str) -> Job:
    options = ["--device-memory", device_memory]
    command = [sys.executable, SHARING, "--until", str(end)]
    job = nodes.start(SOURCE, command, job=f"sharing-{device_memory}", env=dict(os.environ), options=options)
    until("both have seen it", lambda: "READY" in job.lines() or job.process.poll() is not None, PATIENCE_S)
    assert "READY" in job.lines(), job.text()
    return job


def _ends_well(job: Job, end: Path) -> None:
    end.touch()
    code = job.finish(PATIENCE_S)
    assert code == 0, job.text()
    command = [sys.executable, SHARING, "--until", str(end)]
    alone = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert job.lines() == alone.stdout.splitlines()


@pytest.mark.parametrize("held", [False, True], ids=["files", "held"])
def test_rank_that_shares_device_memory_moves_there_and_back(nodes: Cluster, held: bool) -> None:
    """Tensors that torch passes between processes, with the events that come with them."""
    hold_device_memory(nodes, (SOURCE, TARGET), on=held)
    try:
        with configured(nodes, (SOURCE, TARGET), {"move_shared_device_memory": True}):
            _moves_there_and_back(nodes)
    finally:
        hold_device_memory(nodes, (SOURCE, TARGET), on=False)


def _moves_there_and_back(nodes: Cluster) -> None:
    end = nodes.folder / "sharing-shared.end"
    job = _begun(nodes, end, "shared")
    for to in (TARGET, SOURCE):
        moved = nodes.move(job, to, timeout_s=PATIENCE_S)
        assert "close-shared" in {part["name"] for part in moved["parts"]}
    _ends_well(job, end)


@pytest.mark.parametrize("device_memory", ["driver", "offload", "shared"])
def test_rank_that_shares_device_memory_runs_and_is_refused(nodes: Cluster, device_memory: str) -> None:
    end = nodes.folder / f"sharing-{device_memory}.refused"
    job = _begun(nodes, end, device_memory)
    done = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    _ends_well(job, end)
    assert done.returncode != 0
    assert "gpu-ipc" in done.stdout + done.stderr
