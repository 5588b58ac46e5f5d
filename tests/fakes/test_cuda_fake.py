"""The fakes of libcuda and NVML behave as was measured on the real ones: states, errors, and device memory.

tests/contract/test_cuda.py tests the product's client against the fake and the real driver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.descriptors import open_links
from tests.fakes.cuda_asking import (
    CHECKPOINTED,
    DEVICE_BYTES,
    LOCKED,
    MIB,
    RUNNING,
    alone,
    ask,
    asking,
    device_mappings,
    error,
    maps,
    state,
    used,
)
from tests.fakes.cuda_fake import GpuNode, gpus
from tests.fakes.device_job import DeviceJob

# ---------------------------------------------------------------- states


def test_checkpointed_and_restored_job_computes_what_an_undisturbed_one_does(
    node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path
) -> None:
    options = ("--mib", "4", "--threads", "2", "--pinned-mib", "4", "--export")
    job = start(node, *options)
    assert state(node, job.pid) == RUNNING
    assert error(node, "lock", job.pid) == "SUCCESS"
    assert state(node, job.pid) == LOCKED
    assert error(node, "checkpoint", job.pid) == "SUCCESS"
    assert state(node, job.pid) == CHECKPOINTED
    assert error(node, "restore", job.pid) == "SUCCESS"
    assert state(node, job.pid) == LOCKED
    assert error(node, "unlock", job.pid) == "SUCCESS"
    assert state(node, job.pid) == RUNNING
    steps = job.end_soon()
    assert job.finish() == alone(node, tmp_path, *options, *steps)


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        ((), ("checkpoint", "restore", "unlock")),
        (("lock",), ("lock", "restore")),
        (("lock", "checkpoint"), ("lock", "checkpoint", "unlock")),
        (("lock", "checkpoint", "restore"), ("lock", "restore")),
    ],
    ids=["running", "locked", "checkpointed", "restored"],
)
def test_calls_in_the_wrong_state_change_nothing(
    node: GpuNode, start: Callable[..., DeviceJob], way: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    job = start(node)
    for call in way:
        assert error(node, call, job.pid) == "SUCCESS"
    before = state(node, job.pid)
    for call in refused:
        assert error(node, call, job.pid) == "ILLEGAL_STATE"
        assert state(node, job.pid) == before


def test_process_without_initialised_cuda_has_no_state(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node, "--children", "1")
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    assert error(node, "state", child) == "NOT_INITIALIZED"
    assert error(node, "state", os.getpid()) == "NOT_INITIALIZED"
    program = "import ctypes, time; ctypes.CDLL('libcuda.so.1'); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, **node.environment}
    ) as loaded:
        assert loaded.stdout is not None
        loaded.stdout.readline()
        assert error(node, "state", loaded.pid) == "NOT_INITIALIZED"
        loaded.kill()
        os.waitid(os.P_PID, loaded.pid, os.WEXITED | os.WNOWAIT)
        assert error(node, "state", loaded.pid) == "OPERATING_SYSTEM"
    assert error(node, "state", loaded.pid) == "OPERATING_SYSTEM"


def test_process_is_running_after_cuinit_only(node: GpuNode) -> None:
    program = "import ctypes, time; ctypes.CDLL('libcuda.so.1').cuInit(0); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, **node.environment}
    ) as idle:
        assert idle.stdout is not None
        idle.stdout.readline()
        for call in ("lock", "checkpoint", "restore", "unlock"):
            assert error(node, call, idle.pid) == "SUCCESS"
        assert state(node, idle.pid) == RUNNING
        assert used(node) == [{}, {}]
        idle.kill()


def test_stopped_process_executes_the_request_when_it_continues(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    for patience_s in (1.5, 15, 60):  # nothing shows when the requests have been made
        os.kill(job.pid, signal.SIGSTOP)
        with asking(node, "lock", job.pid, 100) as asker, asking(node, "state", job.pid) as other:
            with pytest.raises(subprocess.TimeoutExpired):
                asker.wait(patience_s)
            assert other.poll() is None
            asker.kill()
            other.kill()
        os.kill(job.pid, signal.SIGCONT)
        if state(node, job.pid) == LOCKED:
            return
    pytest.fail("the request was not executed")


def test_locked_process_makes_no_step(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node, "--pace-s", "0", "--steps", "100000", "--mib", "1")
    assert error(node, "lock", job.pid) == "SUCCESS"
    time.sleep(0.2)  # a line may be in the middle of being printed
    before = job.steps()
    time.sleep(0.5)
    assert job.steps() == before
    assert error(node, "unlock", job.pid) == "SUCCESS"
    job.wait_for_steps(3)


def test_lock_of_a_busy_gpu_times_out(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node, "--busy-ms", "3000", ready="busy 0")
    assert error(node, "lock", job.pid, 100) == "NOT_READY"
    assert state(node, job.pid) == RUNNING
    assert error(node, "lock", job.pid, 20000) == "SUCCESS"
    assert state(node, job.pid) == LOCKED


def test_request_of_a_killed_caller_is_finished(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    assert error(node, "lock", job.pid) == "SUCCESS"
    node.fault("checkpoint", "slow:1000")
    with asking(node, "checkpoint", job.pid) as asker:
        while node.faults():
            time.sleep(0.001)
        time.sleep(0.3)
        asker.kill()
    assert state(node, job.pid) == CHECKPOINTED
    node.fault("restore", "die-after")
    with asking(node, "restore", job.pid) as asker:
        assert asker.wait(60) == -signal.SIGKILL
    assert state(node, job.pid) == LOCKED
    assert error(node, "unlock", job.pid) == "SUCCESS"
    job.wait_for_steps(2)


def test_requests_of_killed_callers_do_not_fill_the_mailbox(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    for _ in range(20):
        node.fault("state", "die-after")
        with asking(node, "state", job.pid) as asker:
            output, _ = asker.communicate(timeout=60)
            assert asker.returncode == -signal.SIGKILL, (output, node.faults())
    assert state(node, job.pid) == RUNNING


# ---------------------------------------------------------------- memory


def test_device_memory_is_gone_while_checkpointed_and_back_after_restore(
    node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (devices / name).touch()
    job = start(node, "--pinned-mib", "4", FAKE_CUDA_DEVICE_DIR=str(devices))
    before = device_mappings(job.pid)
    assert before
    assert sum(str(devices) in name for name in open_links(job.pid).values()) == 3
    assert maps(job.pid).count(str(devices)) == 3
    assert "/dev/zero (deleted)" in maps(job.pid)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert not device_mappings(job.pid)
    assert str(devices) not in maps(job.pid)
    assert not [name for name in open_links(job.pid).values() if str(devices) in name or str(node.folder) in name]
    assert used(node) == [{}, {}]
    for call in ("restore", "unlock"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert device_mappings(job.pid) == before
    assert maps(job.pid).count(str(devices)) == 3
    job.wait_for_steps(1)


def test_managed_memory_is_not_checkpointed(node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path) -> None:
    job = start(node, "--managed-mib", "2")
    assert error(node, "lock", job.pid) == "SUCCESS"
    assert error(node, "checkpoint", job.pid) == "NOT_SUPPORTED"
    assert state(node, job.pid) == LOCKED
    assert error(node, "unlock", job.pid) == "SUCCESS"
    job.wait_for_steps(1)


def test_managed_memory_is_a_mapping_of_uvm(start: Callable[..., DeviceJob], node: GpuNode) -> None:
    folder = Path(f"/dev/shm/devices-{os.getpid()}")  # tmpfs: its files may be as large as an address
    folder.mkdir()
    try:
        (folder / "nvidia-uvm").touch()
        job = start(node, "--managed-mib", "2", FAKE_CUDA_DEVICE_DIR=str(folder))
        found = [line.split() for line in maps(job.pid).splitlines() if line.endswith("nvidia-uvm")]
        assert [row[0].split("-")[0] for row in found] == ["204a00000", "7e0000000000"]
        assert int(found[1][2], 16) == 0x7E0000000000
        job.end()
    finally:
        (folder / "nvidia-uvm").unlink()
        folder.rmdir()


def test_device_memory_is_counted_per_process(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    first = start(node)
    second = start(node, "--device", "1", "--mib", "64")
    context = node.context_mib * MIB
    assert used(node) == [{str(first.pid): DEVICE_BYTES + context}, {str(second.pid): 64 * MIB + context}]
    first.end()
    assert used(node) == [{}, {str(second.pid): 64 * MIB + context}]


def test_allocation_on_a_full_gpu_fails(tmp_path: Path, start: Callable[..., DeviceJob]) -> None:
    node = GpuNode(tmp_path / "node-1", gpus("node-1", memory_mib=300), context_mib=20)
    first = start(node, "--mib", "160")
    second = DeviceJob(tmp_path / "second", node.environment, "--mib", "160", "--steps", "1")
    try:
        second.wait_for("WRONG cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
    finally:
        second.end()
    first.end()
    start(node, "--mib", "160")


def test_restore_that_failed_for_lack_of_room_can_be_repeated(tmp_path: Path, start: Callable[..., DeviceJob]) -> None:
    node = GpuNode(tmp_path / "node-1", gpus("node-1", memory_mib=300), context_mib=20)
    first = start(node, "--mib", "160")
    for call in ("lock", "checkpoint"):
        assert error(node, call, first.pid) == "SUCCESS"
    second = start(node, "--mib", "160")
    assert error(node, "restore", first.pid) == "OUT_OF_MEMORY"
    assert state(node, first.pid) == CHECKPOINTED
    second.end()
    for call in ("restore", "unlock"):
        assert error(node, call, first.pid) == "SUCCESS"
    first.wait_for_steps(1)


# ---------------------------------------------------------------- GPUs


def test_nvml_reports_the_gpus_of_the_file(tmp_path: Path) -> None:
    node = GpuNode(tmp_path / "node-1", gpus("node-1", 2, memory_mib=512), driver_version="570.10.01")
    answer = ask(node, "nvml")
    assert (answer["driver"], answer["cuda"]) == ("570.10.01", 12080)
    assert [gpu["uuid"] for gpu in answer["gpus"]] == [gpu.uuid for gpu in node.gpus]
    assert answer["gpus"][1] == {
        "uuid": node.gpus[1].uuid,
        "name": "NVIDIA H200",
        "minor": 1,
        "capability": [9, 0],
        "total": 512 * MIB,
        "used": 0,
        "mig": [0, 0],
        "processes": {},
        "mps": [],
    }


def test_restore_needs_pairs_for_every_gpu(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    here, there = (gpu.uuid for gpu in node.gpus)
    strange = gpus("elsewhere")[0].uuid
    for pairs in (
        [f"{here}={there}"],
        [f"{strange}={there}", f"{there}={here}"],
        [f"{here}={strange}", f"{there}={here}"],
        [f"{here}={here}", f"{there}={here}"],
    ):
        assert error(node, "restore", job.pid, *pairs) == "INVALID_VALUE"
        assert state(node, job.pid) == CHECKPOINTED
    assert error(node, "restore", job.pid, f"{here}={there}", f"{there}={here}") == "SUCCESS"
    assert error(node, "unlock", job.pid) == "SUCCESS"
    assert used(node)[0] == {}
    assert list(used(node)[1]) == [str(job.pid)]
    job.wait_for_steps(1)


def test_older_driver_refuses_pairs(tmp_path: Path, start: Callable[..., DeviceJob]) -> None:
    node = GpuNode(tmp_path / "node-1", gpus("node-1"), driver_version="570.10.01")
    job = start(node)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    uuid = node.gpus[0].uuid
    assert error(node, "restore", job.pid, f"{uuid}={uuid}") == "INVALID_VALUE"
    assert error(node, "restore", job.pid) == "SUCCESS"


def test_driver_without_checkpoint_lacks_its_symbols(tmp_path: Path) -> None:
    node = GpuNode(tmp_path / "node-1", gpus("node-1"), driver_version="550.54.14", checkpoints=False)
    library = ctypes.CDLL(str(node.folder / "libcuda.so.1"))
    assert hasattr(library, "cuInit")
    assert not hasattr(library, "cuCheckpointProcessLock")


def test_driver_threads_are_named_and_block_no_signal(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node)
    names = {}
    for task in Path(f"/proc/{job.pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        names[fields["Name"]] = (int(task.name), int(fields["SigBlk"], 16))
    [restorer] = [name for name in names if name.startswith("cuda") and name[4:].isdigit()]
    assert len(restorer) == 15
    assert names["cuda-EvtHandlr"][1] == names[restorer][1] == 0
    assert ask(node, "restore_thread", job.pid)["tid"] == names[restorer][0]
