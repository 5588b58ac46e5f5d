"""Building communicators is cancelled while the real NCCL waits inside a blocking call, and succeeds afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration.gpu.gpu_jobs import needs_cuda
from integration.gpu.nccl_probe import ROOT

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_cuda()]


def test_cancelled_attach_of_the_real_nccl_leaves_nothing_and_the_next_succeeds() -> None:
    command = [sys.executable, "-m", "integration.gpu.nccl_cancel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.count("round ") == 5
