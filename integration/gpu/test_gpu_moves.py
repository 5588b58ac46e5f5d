"""A training job on the GPU moves between two nodes, and its output is bit-identical to that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.gpu.gpu_jobs import (
    ON_GPU,
    OTHER,
    SKIPPED,
    SOURCE,
    STEPS,
    TARGET,
    Training,
    Undisturbed,
    measured,
    needs_gpu,
    record,
    undisturbed_runs,
)
from integration.harness import Cluster

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_gpu()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
#: Not in /tmp, which is private to a node: the moved run uses the compiled kernels of the undisturbed run.
COMPILES = {
    "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
    "TRITON_CACHE_DIR": str(FOLDER / "triton"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass(frozen=True)
class Variant:
    name: str
    flags: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.flags, "--steps", str(self.steps))


#: Enough device memory to be offloaded.
_BALLAST = ("--gib", "0.25") if ON_GPU else ()
VARIANTS = (
    Variant("plain", (*_BALLAST, "--conv")),
    Variant("amp-fp16", (*_BALLAST, "--amp", "fp16")),
    Variant("amp-bf16", (*_BALLAST, "--amp", "bf16")),
    Variant("graph", (*_BALLAST, "--graph")),
    Variant("loader-fork", (*_BALLAST, "--loader", "fork")),
    Variant("loader-spawn", (*_BALLAST, "--loader", "spawn")),
    Variant("streams", (*_BALLAST, "--streams")),
    Variant("threads", (*_BALLAST, "--threads")),
    Variant("compile", (*_BALLAST, "--compile"), COMPILES),
    # The same with torch's pool of compiler processes, whose workers end before the move.
    Variant("compile-pool", (*_BALLAST, "--compile"), {**COMPILES, "TORCHINDUCTOR_COMPILE_THREADS": "2"}),
)
EVERYTHING = Variant(
    "everything", (*_BALLAST, "--amp", "fp16", "--graph", "--streams", "--loader", "fork"), steps=2 * STEPS
)
ROUND_TRIPS = 5 if ON_GPU else 2


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest) -> Iterator[Undisturbed]:
    """The undisturbed runs of all selected variants, started at once: the GPU has room for several."""
    with undisturbed_runs(FOLDER) as runs:
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.path == Path(__file__) and hasattr(item, "callspec"):
                variant: Any = item.callspec.params["variant"]
                runs.want(variant.arguments, variant.environment)
        yield runs


def _start(nodes: Cluster, undisturbed: Undisturbed, variant: Variant) -> Training:
    if "--compile" in variant.flags:  # skipped if torch.compile does not work; uses the compiled kernels of this run
        alone = undisturbed.want(variant.arguments, variant.environment).result()
        if alone.code == SKIPPED:
            pytest.skip(next(line for line in alone.text.splitlines() if line.startswith("SKIP"))[5:])
    return Training.start(nodes, f"gpu-{variant}", variant.arguments, variant.environment)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_moved_training_job_is_bit_identical(nodes: Cluster, undisturbed: Undisturbed, variant: Variant) -> None:
    training = _start(nodes, undisturbed, variant)
    at = training.await_moment()
    result = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(variant.arguments, variant.environment))
    record(f"moves-{variant}", at_step=at, steps=steps, seed=training.seed, **measured(result))


@pytest.mark.parametrize("variant", [EVERYTHING], ids=str)
def test_training_job_moves_there_and_back_five_times(
    nodes: Cluster, undisturbed: Undisturbed, variant: Variant
) -> None:
    training = _start(nodes, undisturbed, variant)
    training.await_moment()
    results = []
    for _ in range(ROUND_TRIPS):
        for to in (OTHER, SOURCE):
            results.append(measured(training.move(to)))
            training.await_progress()
    training.runs_on(SOURCE)
    steps = training.ends_as(undisturbed.want(variant.arguments, variant.environment))
    record(f"there-and-back-{variant}", steps=steps, seed=training.seed, moves=results)
