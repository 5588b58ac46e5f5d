"""Triton compiles on after every move: its cache, whose files are closed, has moved with the rank."""

from __future__ import annotations

import os

import pytest

from integration.clients.compiling import COMPILES_S, compile_after_every_move
from integration.gpu.gpu_jobs import SOURCE, TARGET, needs_cuda
from integration.harness import Cluster

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(COMPILES_S), needs_cuda()]


def test_triton_compiles_again_after_every_move(nodes: Cluster) -> None:
    compile_after_every_move(nodes, (TARGET, SOURCE, TARGET), "--device", "cuda")
    cache = nodes.run_dir(TARGET).parents[1] / "tmp" / f"triton_{os.geteuid()}"
    kernels = {str(path.relative_to(cache)) for path in cache.rglob("*.cubin")}
    assert len(kernels) >= 3, f"the kernels that were compiled on {SOURCE} did not arrive: {kernels}"
