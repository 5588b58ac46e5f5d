"""Shared by the tests of whole jobs with device memory: asking for something, and what it said."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from integration.gpu_nodes import GpuCluster
from integration.harness import Asked, Cluster, Job, until
from integration.job_commands import ask, reaching
from integration.offloads import LARGE, LARGE_MIB, MIB, part

#: What the fake driver's own memory takes for each process, and a little more for small allocations.
CONTEXT_MIB = 64 + 2


def asking(
    nodes: Cluster, node: str, point: str, action: str, *arguments: str
) -> contextlib.AbstractContextManager[Asked]:
    """As `reaching`, for `migrator job …`."""
    return reaching(nodes, node, point, action, "job", *arguments)


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
