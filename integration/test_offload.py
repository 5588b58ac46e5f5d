"""Ranks whose device memory the shim offloads into files move between nodes with fake GPUs (`hold_device_memory` is off).

Daemons, CRIU, shim, helper and stripes are real; only the driver is fake. What happens when such a move fails is in
test_offload_undo.py, and memory that stays on its GPU in test_hold.py. The same on a real GPU is in integration/gpu.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import Job, until
from integration.offloads import LARGE, LARGE_MIB, MIB, SOURCE, TARGET, UNDONE, children, part, start, stopped_senders
from snapshotd.moves.device import standstill
from snapshotd.runtime.faults import Point
from tests.sampling import Sampler


@pytest.fixture
def lab(fake_gpu_files_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield fake_gpu_files_lab
    fake_gpu_files_lab.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [
        LARGE,
        ("--mib", "40", "--api", "segments"),
        ("--mib", "60", "--blocks", "6", "--mixed"),
        ("--mib", "40", "--api", "driver", "--threads", "2", "--children", "1"),
    ],
    ids=["runtime", "segments", "mixed", "driver"],
)
def test_rank_moves_there_and_back(lab: GpuCluster, sampled: Sampler, arguments: tuple[str, ...]) -> None:
    """Once, or with `--whole` three times."""
    job = start(lab, *arguments)
    for _ in sampled(range(3), 1):
        move_and_account(lab, job, SOURCE, TARGET)
        move_and_account(lab, job, TARGET, SOURCE)
    lab.ends_well(job)


def move_and_account(lab: GpuCluster, job: Job, at: str, to: str) -> None:
    """Moves a job; every byte of its device memory is either offloaded or in the driver's checkpoint."""
    job.await_progress(3)
    held = until("the job's memory on the GPU", lambda: lab.used_bytes(at) > 96 * MIB and lab.used_bytes(at))
    with lab.cluster.moving(job, to, at, Point.OFFLOADED) as asked:
        until("memory to leave the GPU", lambda: lab.used_bytes(at) <= held - 32 * MIB)
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    result = asked.answer
    assert result["warnings"] == []
    size, used = part(result, "offload")["bytes"], result["device_bytes"]
    assert size >= 32 * MIB
    assert part(result, "refill")["bytes"] == size
    assert abs(part(result, "checkpoint")["bytes"] - (used - size)) < MIB
    assert result["longest_part"]["name"] in {each["name"] for each in result["parts"]} - {"prepare", "empty-cache"}
    job.await_progress(2)
    until("the GPU that was left to be empty", lambda: lab.used_bytes(at) == 0)
    until("all memory on the other GPU", lambda: abs(lab.used_bytes(to) - used) < MIB)


@pytest.mark.sampled(1, group="offloads")
def test_zero_pages_of_device_memory_are_not_sent(lab: GpuCluster) -> None:
    job = start(lab, "--mib", "8", "--zero-mib", "96", "--api", "runtime")
    for to in (TARGET, SOURCE):
        job.await_progress(3)
        result = lab.cluster.move(job, to)
        moved = part(result, "offload")["bytes"]
        assert moved == part(result, "refill")["bytes"] == 104 * MIB
        assert result["bytes"] < moved // 2, "the image is included"
        assert result["bytes"] == journalled_bytes(lab, result["move"])
    lab.ends_well(job)


def journalled_bytes(lab: GpuCluster, move: str) -> int:
    """What the source has sent according to its journal. Zero pages, which the target makes itself, do not count."""
    ended = json.loads(lab.cluster.migrator("history", "--json").stdout)["moves"]
    return next(int(each["bytes"]) for each in ended if each["move"] == move)


@pytest.mark.sampled(1, group="offloads")
def test_rank_that_starts_sharing_memory_before_the_freeze_continues(lab: GpuCluster) -> None:
    share = lab.cluster.folder / f"share-{time.monotonic_ns()}"
    job = start(lab, *LARGE, "--export-when", str(share))
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.READY) as asked:  # preflight has passed by now
        share.touch()
        job.await_progress(3)
    assert asked.code == UNDONE
    assert "has begun to share device memory" in asked.answer["reason"], asked.answer
    refused = lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    assert "gpu-ipc" in refused.stdout
    lab.ends_well(job)


def test_job_does_not_run_while_its_memory_is_offloaded(lab: GpuCluster) -> None:
    for node, point in ((SOURCE, Point.OFFLOADED), (TARGET, Point.REFILLED)):
        job = start(lab, *LARGE, "--threads", "2", pace_s=0.01)
        job.await_lines(5)
        with lab.cluster.moving(job, TARGET, node, point) as asked:
            before = job.lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(1.0)  # long enough for many steps
            assert job.lines() == before, f"it ran at {point}"
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        lab.ends_well(job)


@pytest.mark.sampled(1, group="offloads")
def test_device_memory_driver_leaves_memory_to_the_driver(lab: GpuCluster) -> None:
    job = lab.job(SOURCE, *LARGE, options=("--device-memory", "driver"))
    job.await_lines(5)
    result = lab.cluster.move(job, TARGET)
    assert not {"offload", "refill"} & {each["name"] for each in result["parts"]}
    lab.ends_well(job)


def test_check_shows_how_device_memory_will_move(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    job.await_lines(3)
    done = lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert f"SNAPSHIM_DEVICE_MEMORY=offload: {LARGE_MIB} MiB in 4 blocks" in checks["gpu-device-memory"]["reason"]
    assert checks["gpu-offload-room"]["verdict"] == "pass"


# ---------------------------------------------------------------- fallbacks


@contextlib.contextmanager
def only_grpc(lab: GpuCluster, node: str) -> Iterator[None]:
    """While the block runs, the network rejects all connections to the node except those to its daemon's gRPC port."""
    rule = "iifname != lo tcp flags & (syn | ack) == syn tcp dport != 7070 reject with tcp reset"
    table = f"table inet fence {{\n chain in {{\n type filter hook input priority 0;\n {rule}\n }}\n}}\n"

    def filtered(commands: str) -> None:
        script = f"from snapshotd.net import nft; nft.apply({commands!r})"
        assert lab.lab.spawn(node, [sys.executable, "-c", script]).wait(60) == 0

    filtered(table)
    try:
        yield
    finally:
        filtered("delete table inet fence")


@pytest.mark.sampled(1, group="offloads")
def test_device_memory_follows_the_image_without_a_device_memory_channel(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    with only_grpc(lab, TARGET):
        result = lab.cluster.move(job, TARGET)
    assert part(result, "offload")["bytes"] == part(result, "refill")["bytes"] == LARGE_MIB * MIB
    assert "offloaded device memory follows the image" in result["warnings"][0]
    lab.ends_well(job)


@pytest.mark.sampled(1, group="offloads")
def test_device_memory_follows_the_image_if_its_channel_breaks(lab: GpuCluster) -> None:
    """The files follow the image, and nothing is sent twice."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with stopped_senders(lab, job, Point.BEFORE_DUMP) as (senders, asked):
        os.kill(senders[0], signal.SIGKILL)
        until("the other senders to end", lambda: not set(senders) & set(children(lab, SOURCE, "")))
    assert asked.code == 0, f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    assert part(asked.answer, "refill")["bytes"] == LARGE_MIB * MIB
    lab.ends_well(job)


@pytest.mark.sampled(1, group="offloads")
def test_thread_that_stays_in_the_driver_does_not_prevent_the_move(lab: GpuCluster) -> None:
    """No thread is parked inside the driver before the driver is locked.

    The daemon releases the parked threads and locks first. Threads that then turn out to be parked during an
    allocation are released once more and parked elsewhere."""
    job = start(lab, *LARGE, "--churn", "--threads", "3", pace_s=0.0)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.BEFORE_FREEZE) as asked:
        lab.nodes[SOURCE].fault("create", f"slow:{(standstill.LOCK_S + 2) * 1000:.0f}")
        until("a thread to be in the driver", lambda: not lab.nodes[SOURCE].faults())
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    logged = logged_of(lab, SOURCE, asked.answer["move"])
    for text in ("locking the driver before parking threads", "releasing threads to try again"):
        assert any(text in line for line in logged), lab.cluster.logs()
    assert part(asked.answer, "refill")["bytes"] >= LARGE_MIB * MIB
    job.await_progress(3)
    lab.cluster.move(job, SOURCE)
    lab.ends_well(job)


def logged_of(lab: GpuCluster, node: str, move: str) -> list[str]:
    """What a node's daemon has logged about a move."""
    return [line for line in lab.lab.daemon_log(node).read_text(errors="replace").splitlines() if f" {move} " in line]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("operation", ["copy", "pin"])
def test_driver_checkpoint_carries_the_memory_if_the_copy_fails(lab: GpuCluster, operation: str) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.nodes[SOURCE].fault(operation, "fail:CUDA_ERROR_UNKNOWN", once=False)
    result = lab.cluster.move(job, TARGET)
    assert "refill" not in {each["name"] for each in result["parts"]}
    assert part(result, "checkpoint")["bytes"] >= LARGE_MIB * MIB
    assert "the driver's checkpoint carries the device memory" in result["warnings"][0]
    lab.nodes[SOURCE].clear_faults()
    lab.ends_well(job)
