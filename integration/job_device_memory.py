"""Shared by the tests of whole jobs with device memory: asking for something, and what it said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from integration.gpu_nodes import GpuCluster
from integration.harness import MIGRATOR, PATIENCE_S, Asked, Cluster, Job, until
from integration.job_commands import ask
from integration.offloads import LARGE, LARGE_MIB, MIB, part

#: What the fake driver's own memory takes for each process, and a little more for small allocations.
CONTEXT_MIB = 64 + 2


@contextlib.contextmanager
def asking(nodes: Cluster, node: str, point: str, action: str, *arguments: str) -> Iterator[Asked]:
    """Asks, and runs the block when a node's daemon has reached a fault point. If the daemon waits there it goes on after the
    block. The answer is complete after it."""
    nodes.fault(node, point, action)
    asked = Asked()
    with subprocess.Popen(
        [*MIGRATOR, "job", *arguments, "--json"],
        env=nodes.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until(f"{point} on {node}", lambda: nodes.fired(node) or process.poll() is not None)
            assert process.poll() is None, f"it ended before {point}: {process.communicate()}\n{nodes.logs()}"
            yield asked
            if action == "wait":
                (nodes.run_dir(node) / f"{point}.go").touch()
            out, asked.errors = process.communicate(timeout=PATIENCE_S)
            asked.code, asked.answer = process.returncode, json.loads(out)
        finally:
            process.kill()


def start(lab: GpuCluster) -> Job:
    """A rank on the first node whose device memory can be offloaded."""
    job = lab.job("node-1", *LARGE, "--threads", "1")
    job.await_lines(5)
    return job


def sizes(answer: dict[str, Any]) -> dict[str, int]:
    """The bytes of each part."""
    assert answer["warnings"] == [], answer
    return {one["name"]: one["bytes"] for one in answer["parts"]}


def holders(nodes: Cluster) -> set[int]:
    """The processes that hold device memory, without those that keep files which the rank of a snapshot had open."""
    return set(nodes.processes_of("snapshotd.holder")) - set(nodes.processes_of("files.sock"))


def kill(lab: GpuCluster, job: Job) -> None:
    (rank,) = lab.cluster.processes_of(f"{job.name}.end")
    os.kill(rank, signal.SIGKILL)


def snapshot_and_rollback(lab: GpuCluster, job: Job) -> None:
    """Both work, and nothing is left on a GPU but the rank."""
    taken = ask(lab.cluster, "snapshot", job.name)
    until("the holders to end", lambda: not holders(lab.cluster))
    job.await_progress(3)
    kill(lab, job)
    back = ask(lab.cluster, "rollback", job.name)
    assert part(back, "refill")["bytes"] == part(taken, "offload")["bytes"] >= LARGE_MIB * MIB
    job.await_progress(3)
