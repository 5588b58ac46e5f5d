"""A job with much device memory on the real GPU is snapshotted, killed and rolled back, and ends like an undisturbed one.

Prints where the time went. `SNAPSHOT_GPU_JOB_GIB` sets the size of the job. In one case the GPU has room for a second copy.
In the other one another process has taken it, and the memory is copied to the host while the rank waits. A snapshot and its
copy lie in the memory of this machine, so it needs four times the size of the job. With less the job is snapshotted and ends
undisturbed, without a rollback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu import host_memory, spans
from integration.gpu.gpu_jobs import (
    GIB,
    PATIENCE_S,
    SOURCE,
    STEPS,
    Training,
    Undisturbed,
    measured,
    needs_cuda,
    record,
    undisturbed_runs,
)
from integration.harness import Cluster, until

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600), needs_cuda()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
LARGE_GIB = os.environ.get("SNAPSHOT_GPU_JOB_GIB", "8")
LARGE = ("--gib", LARGE_GIB, "--steps", str(STEPS))
#: Takes all but some of the GPU's memory until its stdin is closed.
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""
#: Too little for a copy beside what must stay free, and enough to replace a block of any size.
LEFT_BYTES = int((float(LARGE_GIB) + 4) * GIB)
PARTS = (
    *(
        "park",
        "lock",
        "unlock",
        "offload",
        "relock",
        "checkpoint",
        "twin",
        "criu-dump",
        "copy-out",
        "give-back",
        "save",
    ),
    *("save-host", "criu-restore", "cuda-restore", "refill"),
)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with undisturbed_runs(FOLDER) as runs:
        runs.want(LARGE)
        yield runs


@contextlib.contextmanager
def gpu(*, full: bool) -> Iterator[None]:
    if not full:
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(LEFT_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "taken\n"
        yield


def ask(nodes: Cluster, verb: str, name: str) -> dict[str, Any]:
    done = nodes.migrator("job", verb, name, "--json", timeout_s=PATIENCE_S)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{nodes.logs()}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"| {LARGE_GIB} GiB | {' | '.join(results)} |", "| --- " * (len(results) + 1) + "|"]
    found = [{part["name"]: part["seconds"] for part in one["parts"]} for one in results.values()]
    phases = [{phase["name"]: phase["seconds"] for phase in one["phases"]} for one in results.values()]
    rows = [(name, name, phases) for name in dict.fromkeys(name for one in phases for name in one)]
    rows += [(f"· {name}", name, found) for name in PARTS]
    lines += [f"| {title} | {' | '.join(f'{one.get(name, 0):.3f}' for one in of)} |" for title, name, of in rows]
    lines.append(f"| **pause** | {' | '.join(str(one['pause_s']) for one in results.values())} |")
    lines.append(f"| **in all** | {' | '.join(str(one['seconds']) for one in results.values())} |")
    return "\n".join(lines)


@pytest.mark.parametrize("full", [False, True])
def test_killed_rank_is_put_back_from_a_snapshot(nodes: Cluster, undisturbed: Undisturbed, *, full: bool) -> None:
    undisturbed.settled()
    training = Training.start(nodes, f"memory{int(full)}", LARGE, device_memory="offload")
    training.await_moment()
    with gpu(full=full):
        taken = ask(nodes, "snapshot", training.job.name)
        where = spans.of_last_freeze(nodes, SOURCE)
        training.await_progress()
    sizes = {part["name"]: part["bytes"] for part in taken["parts"]}
    assert taken["warnings"] == []
    assert float(LARGE_GIB) * GIB <= sizes["offload"] == sizes["save"]
    assert ("copy-out" in sizes, "give-back" in sizes) == (full, not full)
    until("the holders to end", lambda: not nodes.processes_of("snapshotd.holder"))
    results = {"snapshot": taken}
    if host_memory.available_bytes() > 2 * float(LARGE_GIB) * GIB:
        rank = training.pid()
        assert rank is not None
        os.kill(rank, signal.SIGKILL)
        results["rollback"] = ask(nodes, "rollback", training.job.name)
        training.runs_on(SOURCE)
    training.ends_as(undisturbed.want(LARGE))
    record("job-memory", gib=LARGE_GIB, full=full, **{name: measured(one) for name, one in results.items()})
    print(f"\nGPU {'without' if full else 'with'} room for a copy\n{table(results)}")
    print(where)
