"""A job whose processes share device memory (CUDA IPC) runs under `migrator run` as without it; moving it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.gpu.gpu_jobs import PATIENCE_S, SOURCE, TARGET, needs_cuda
from integration.harness import Cluster, until

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_cuda()]

SHARING = str(Path(__file__).parents[1] / "workloads" / "gpu_sharing.py")


@pytest.mark.parametrize("device_memory", ["offload", "driver"])
def test_rank_that_shares_device_memory_runs_and_is_refused(nodes: Cluster, tmp_path: Path, device_memory: str) -> None:
    end = nodes.folder / f"sharing-{device_memory}.end"
    command = [sys.executable, SHARING, "--until"]
    options = ["--device-memory", device_memory]
    job = nodes.start(SOURCE, [*command, str(end)], job="sharing", env=dict(os.environ), options=options)
    until("both have seen it", lambda: "READY" in job.lines() or job.process.poll() is not None, PATIENCE_S)
    assert "READY" in job.lines(), job.text()
    done = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    end.touch()
    code = job.finish(PATIENCE_S)
    assert code == 0, job.text()
    alone = subprocess.run([*command, str(end)], check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert job.lines() == alone.stdout.splitlines()
    assert done.returncode != 0
    assert "gpu-ipc" in done.stdout + done.stderr
