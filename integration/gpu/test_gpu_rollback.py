"""A GPT in training loses its CUDA context by a real fault. `migrator protect` rolls it back, and nothing but time is lost.

DEVICE=cpu runs the same test without a GPU: the rank ends by an exception there.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from integration.gpu.gpu_jobs import GPT, ON_GPU, SOURCE, Training, needs_gpu, record, undisturbed_runs
from integration.harness import Cluster, until
from integration.protecting import protected

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600), needs_gpu()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
FAILURE = "device-side assert" if ON_GPU else "IndexError"
ROLLED_BACK = ", down "


def _first_step_s(flags: Sequence[str]) -> float:
    """How long the same program takes from its start to its first step, with the compiler's caches of earlier runs: what a
    restart costs at least, without a launcher and without loading a checkpoint."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, GPT, *flags, "--pace-s", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        step = next((line for line in process.stdout if line.startswith("step ")), "")
        took_s = time.monotonic() - began
        process.kill()
    assert step
    return took_s


def _said(path: Path, text: str, times: int) -> bool:
    return path.read_text().count(text) >= times


def test_training_goes_on_after_its_cuda_context_was_lost(nodes: Cluster) -> None:
    """Twice: the second time the job has come back from a snapshot already."""
    broken = nodes.folder / "gpt.broken"
    flags = ("--data", str(FOLDER / "tokens"), "--steps", "500")
    with undisturbed_runs(FOLDER) as runs:
        alone = runs.want(flags, program=GPT)
        training = Training.start(nodes, "gpt", (*flags, "--break-file", str(broken)), program=GPT)
        training.await_steps(20)
        with protected(nodes, training.job.name) as said:
            until("the first snapshot", lambda: ", paused " in said.read_text(), 180)
            for times in (1, 2):
                training.await_progress(30)
                broken.touch()
                until("the rank to fail", lambda: not broken.exists(), 180)
                until(f"rollback {times}", functools.partial(_said, said, ROLLED_BACK, times), 180)
                training.runs_on(SOURCE)
            assert FAILURE in training.job.text()
            lines = said.read_text()
            history = json.loads(nodes.migrator("history", "--json").stdout)
        steps = training.ends_as(alone)
    restart_s = _first_step_s(flags)
    record("gpt-rolled-back", steps=steps, protect=lines.splitlines(), history=history, restart_s=restart_s)
    print(f"\n{steps} steps, bit-identical\n{lines}\nthe same program needs {restart_s:.1f} s to its first step")
