"""Ranks that use NCCL and whose device memory is offloaded move, and are undone, on fakes of both libraries: with memory that
stays on its GPU until it is sent, and through files.

What must hold between the two: the job still runs while the offload is prepared; no communicator exists while memory is
offloaded, on either node; and memory is back before the first communicator is rebuilt.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, SHORT_LEASE, until
from integration.nccl_nodes import NcclJob, unsettled
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = ("node-1", "node-2", "spare-1")
UNDONE = 11
MIB = 1 << 20
#: Just enough on the device to be offloaded: every step hashes all of it.
DEVICE_MIB, BUFFER_MIB = 40, 8


def start(lab: GpuCluster, *places: str, shape: str = "world") -> NcclJob:
    """Every rank has device memory that NCCL reads and writes, and communicators that have device memory too."""
    job = NcclJob(
        lab.cluster,
        places,
        shape=shape,
        pace_s=0.03,
        gpus=lab.nodes,
        device_mib=DEVICE_MIB,
        buffer_mib=BUFFER_MIB,
    )
    job.await_lines(5)
    return job


@pytest.fixture(scope="module", params=[True, False], ids=["held", "files"])
def both_ways_lab(fake_gpu_lab: GpuCluster, request: pytest.FixtureRequest) -> Iterator[GpuCluster]:
    with configured(fake_gpu_lab.cluster, fake_gpu_lab.lab.nodes, {"hold_device_memory": request.param}):
        yield fake_gpu_lab


@pytest.fixture
def held(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["both_ways_lab"])


@pytest.fixture
def lab(both_ways_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield both_ways_lab
    both_ways_lab.reset()


def part(result: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in result["parts"] if each["name"] == name]
    return dict(found)


def used_bytes(lab: GpuCluster, node: str) -> int:
    (gpu,) = lab.shown(node)["gpus"]
    return int(gpu["memory_bytes"] - gpu["memory_free_bytes"])


def moved_both(result: dict[str, Any]) -> None:
    """Communicators were destroyed and rebuilt, and exactly the job's own device memory was offloaded."""
    assert {"quiesce", "detach", "reattach", "open"} <= {phase["name"] for phase in result["phases"]}
    assert result["warnings"] == []
    assert part(result, "offload")["bytes"] == part(result, "refill")["bytes"] == DEVICE_MIB * MIB


# ---------------------------------------------------------------- moves


@pytest.mark.sampled(1, group="offloaded NCCL jobs")
@pytest.mark.parametrize("moved", [0, 1], ids=["rank-0", "rank-1"])
def test_rank_moves_there_and_back(lab: GpuCluster, moved: int) -> None:
    job = start(lab, SOURCE, PEER)
    home = job.places[moved]
    for to in (TARGET, home, TARGET):
        moved_both(lab.cluster.move(job.ranks[moved], to, rank=moved))
        job.await_progress()
    job.ends_well()


@pytest.mark.sampled(1, group="offloaded NCCL jobs")
def test_both_ranks_of_one_node_move(lab: GpuCluster) -> None:
    job = start(lab, SOURCE, SOURCE, shape="pairs")
    for rank, to in ((0, TARGET), (1, PEER)):
        moved_both(lab.cluster.move(job.ranks[rank], to, rank=rank))
        job.await_progress()
    job.ends_well()


@pytest.mark.sampled(1, group="offloaded NCCL jobs")
def test_memory_of_nccl_is_freed_before_the_offload(lab: GpuCluster, *, held: bool) -> None:
    """It is neither offloaded nor part of the driver's checkpoint. Held memory is still on the GPU, with what copies it."""
    job = start(lab, SOURCE, PEER)
    used = used_bytes(lab, SOURCE)
    with lab.cluster.moving(job.ranks[0], TARGET, SOURCE, Point.OFFLOADED) as asked:
        if not held:
            until(
                "the memory to leave the GPU", lambda: used_bytes(lab, SOURCE) <= used - (DEVICE_MIB + BUFFER_MIB) * MIB
            )
    assert asked.code == 0, f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    moved_both(asked.answer)
    assert part(asked.answer, "checkpoint")["bytes"] <= used - (DEVICE_MIB + BUFFER_MIB) * MIB
    job.await_progress()
    until("exactly the same memory on the GPU", lambda: used_bytes(lab, TARGET) == used)
    job.ends_well()


@pytest.mark.sampled(1, group="offloaded NCCL jobs")
def test_job_runs_while_the_offload_is_prepared(lab: GpuCluster) -> None:
    """No gate is closed before files, channel and pinned staging buffers are ready."""
    job = start(lab, SOURCE, PEER)
    with lab.cluster.moving(job.ranks[0], TARGET, SOURCE, Point.READY) as asked:
        folder = lab.cluster.run_dir(SOURCE) / "images" / "parked"
        assert list(folder.glob("m-*/device-*"))
        job.await_progress()
        assert json.loads(lab.cluster.migrator("status", "--json").stdout)["gates"] == []
    assert asked.code == 0, f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    names = [each["name"] for each in asked.answer["parts"]]
    assert names.index("prepare") < names.index("lock")
    assert asked.answer["longest_part"]["name"] not in {"prepare", "empty-cache"}
    job.ends_well()


# ---------------------------------------------------------------- undo


@pytest.mark.sampled(1, group="failures of offloaded NCCL jobs")
@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.READY),
        (SOURCE, Point.DETACH),
        (SOURCE, Point.OFFLOADED),
        (SOURCE, Point.CHECKPOINTED),
        (TARGET, Point.REFILLED),
        (TARGET, Point.ATTACHING),
        (PEER, Point.ATTACHED),
    ],
)
def test_move_that_fails_is_undone_and_a_retry_succeeds(lab: GpuCluster, node: str, point: Point) -> None:
    """The device memory is back on the source before its communicators are rebuilt."""
    job = start(lab, SOURCE, PEER)
    used = used_bytes(lab, SOURCE)
    lab.cluster.fault(node, point, "fail")
    result = lab.cluster.move(job.ranks[0], TARGET, expect=UNDONE)
    assert "fault injected" in result["reason"], result
    assert result["where"] == "running on source", result
    job.await_progress()
    until("exactly the same memory on the GPU", lambda: used_bytes(lab, SOURCE) == used)
    moved_both(lab.cluster.move(job.ranks[0], TARGET))
    job.ends_well()


@pytest.mark.sampled(1, group="failures of offloaded NCCL jobs")
@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.READY),
        (SOURCE, Point.DETACH),
        (SOURCE, Point.OFFLOADED),
        (TARGET, Point.REFILLED),
        (TARGET, Point.ATTACHED),
    ],
)
def test_daemon_killed_leaves_exact_results_and_open_gates(lab: GpuCluster, node: str, point: Point) -> None:
    job = start(lab, SOURCE, PEER)
    lab.cluster.fault(node, point, "kill")
    with lab.cluster.begin_move(job.ranks[0], TARGET, more=SHORT_LEASE) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(node) is None)
        lab.lab.start_daemon(node)
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode in {0, UNDONE}, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(lab.cluster))
    job.ends_well()


@pytest.mark.sampled(1, group="failures of offloaded NCCL jobs")
@pytest.mark.parametrize("point", [Point.READY, Point.OFFLOADED])
def test_driver_killed_restores_memory_and_communicators(lab: GpuCluster, point: Point) -> None:
    """When the lease ends, memory that was offloaded is brought back; then the communicators are rebuilt."""
    job = start(lab, SOURCE, PEER)
    lab.cluster.fault(SOURCE, point, "wait")
    with lab.cluster.begin_move(job.ranks[0], TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}", lambda: lab.cluster.fired(SOURCE))
        asked.kill()
        asked.wait(PATIENCE_S)
    with contextlib.suppress(FileNotFoundError):
        (lab.cluster.run_dir(SOURCE) / f"{point}.go").touch()
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(lab.cluster))
    moved_both(lab.cluster.move(job.ranks[0], TARGET))
    job.ends_well()
