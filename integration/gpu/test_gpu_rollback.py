"""A GPT in training loses its CUDA context by a real fault. `migrator protect` rolls it back, and nothing but time is lost.

DEVICE=cpu runs the same test without a GPU: the rank ends by an exception there.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from integration.gpu.gpu_jobs import GPT, ON_GPU, SOURCE, Training, needs_gpu, record, undisturbed_runs
from integration.harness import Cluster, until
from integration.protecting import protected

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600), needs_gpu()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
FAILURE = "device-side assert" if ON_GPU else "IndexError"
ROLLED_BACK = ", down "


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
    record("gpt-rolled-back", steps=steps, protect=lines.splitlines(), history=history)
    print(f"\n{steps} steps, bit-identical\n{lines}")
