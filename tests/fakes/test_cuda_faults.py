"""Faults that tests inject into the fake driver, and a process that CRIU dumps and restores on another node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.cuda_asking import (
    CHECKPOINTED,
    CRIU,
    FAILED,
    LOCKED,
    MIB,
    RUNNING,
    alone,
    asking,
    device_mappings,
    error,
    state,
    used,
)
from tests.fakes.cuda_fake import GpuNode, gpus
from tests.fakes.device_job import DeviceJob
from tests.shim.jobs import until

# ---------------------------------------------------------------- faults


def test_fault_with_once_fails_one_call(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    node.fault("lock", "fail:CUDA_ERROR_NOT_READY")
    node.fault("state", "fail:CUDA_ERROR_UNKNOWN", pid=job.pid + 1)
    assert error(node, "lock", job.pid) == "NOT_READY"
    assert state(node, job.pid) == RUNNING
    assert error(node, "lock", job.pid) == "SUCCESS"
    assert node.faults() == [f"state: fail:CUDA_ERROR_UNKNOWN once pid={job.pid + 1}"]


def test_fault_without_once_fails_calls_until_it_is_removed(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    node.fault("lock", "fail:CUDA_ERROR_UNKNOWN", once=False, pid=job.pid)
    for _ in range(2):
        assert error(node, "lock", job.pid) == "UNKNOWN"
    node.clear_faults()
    assert error(node, "lock", job.pid) == "SUCCESS"


@pytest.mark.parametrize(("action", "then"), [("hang", RUNNING), ("hang-after", LOCKED)])
def test_injected_hang_blocks_the_call(node: GpuNode, start: Callable[..., DeviceJob], action: str, then: int) -> None:
    job = start(node)
    node.fault("lock", action)
    with asking(node, "lock", job.pid) as asker:
        until(lambda: not node.faults())
        with pytest.raises(subprocess.TimeoutExpired):
            asker.wait(0.5)
        until(lambda: state(node, job.pid) == then)
        asker.kill()
    assert state(node, job.pid) == then


def test_injected_death_of_the_caller_changes_nothing(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    node.fault("lock", "die")
    with asking(node, "lock", job.pid) as asker:
        assert asker.wait(60) == -signal.SIGKILL
    assert state(node, job.pid) == RUNNING


def test_injected_death_of_the_process_frees_its_memory(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    node.fault("lock", "kill")
    # The process dies during the request, or before the answer is read.
    assert error(node, "lock", job.pid) in ("OPERATING_SYSTEM", "NOT_INITIALIZED")
    assert job.popen.wait(60) == -signal.SIGKILL
    assert used(node) == [{}, {}]


def test_process_whose_state_is_lost_fails(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    assert error(node, "lock", job.pid) == "SUCCESS"
    node.fault("checkpoint", "lose")
    assert error(node, "checkpoint", job.pid) == "UNKNOWN"
    job.wait_for("WRONG")
    assert job.popen.wait(60) == 1


def test_lost_state_is_final(node: GpuNode) -> None:
    program = "import ctypes, time; ctypes.CDLL('libcuda.so.1').cuInit(0); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, **node.environment}
    ) as idle:
        assert idle.stdout is not None
        idle.stdout.readline()
        node.fault("lock", "lose")
        assert error(node, "lock", idle.pid) == "UNKNOWN"
        assert state(node, idle.pid) == FAILED
        for call in ("lock", "checkpoint", "restore", "unlock"):
            assert error(node, call, idle.pid) == "ILLEGAL_STATE"
        idle.kill()


# ---------------------------------------------------------------- with CRIU


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="CRIU needs root")
@pytest.mark.skipif(not CRIU.exists(), reason="no CRIU of our own: run `make setup`")
@pytest.mark.parametrize(
    ("way", "mib"),
    [((), 8 + 2 * 2), (("--api", "segments"), 20), (("--mixed",), 5 * 2 + 20)],
    ids=["driver", "segments", "mixed"],
)
def test_dumped_process_continues_on_another_node(
    node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path, way: tuple[str, ...], mib: int
) -> None:
    """In new pid and mount namespaces, with other GPUs in another order, and with its forked child."""
    other = GpuNode(tmp_path / "node-2", gpus("node-2", 2, memory_mib=2048), context_mib=32)
    options = ("--mib", "8", "--threads", "2", "--children", "1", "--pinned-mib", "4")
    job = start(node, *options, *way)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert not device_mappings(job.pid)
    images = tmp_path / "images"
    images.mkdir()
    dump = subprocess.run(
        [CRIU, "dump", "-t", str(job.pid), "-D", images, "-v4", "-o", "dump.log"], capture_output=True, timeout=60
    )
    assert dump.returncode == 0, (images / "dump.log").read_text()[-3000:]
    assert job.popen.wait(60) == -signal.SIGKILL
    restore = f"{CRIU} restore -D {images} -d -v4 -o restore.log; echo $?; sleep 100"
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", restore],
        stdout=subprocess.PIPE,
        text=True,
    ) as space:
        try:
            assert space.stdout is not None
            assert space.stdout.readline() == "0\n", (images / "restore.log").read_text()[-3000:]
            outer = outer_pid(space.pid, job.pid)
            assert state(other, outer) == CHECKPOINTED
            old, new = [gpu.uuid for gpu in node.gpus], [gpu.uuid for gpu in other.gpus]
            assert error(other, "restore", outer, f"{old[0]}={new[1]}", f"{old[1]}={new[0]}") == "SUCCESS"
            assert used(node) == [{}, {}]
            assert used(other) == [{}, {str(outer): (mib + 32) * MIB}]
            assert error(other, "unlock", outer) == "SUCCESS"
            steps = job.end_soon()
            deadline = time.monotonic() + 60
            while "DONE" not in job.lines() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert job.lines() == alone(node, tmp_path, *options, *steps)
        finally:
            space.kill()
    assert used(other) == [{}, {}]


def outer_pid(ancestor: int, inner: int) -> int:
    """The pid in this namespace of the descendant whose own pid is `inner`."""
    todo = [ancestor]
    while todo:
        pid = todo.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        if any(line.startswith("NSpid:") and line.split()[2:] == [str(inner)] for line in status.splitlines()):
            return pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            todo.extend(map(int, (task / "children").read_text().split()))
    raise AssertionError(f"no process below {ancestor} calls itself {inner}")
