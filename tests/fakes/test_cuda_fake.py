"""The fakes of libcuda and NVML behave as was measured on the real ones.

Covers states, errors, device memory at checkpoint and restore, and a process that CRIU dumps and restores on another
node. tests/contract/test_cuda.py tests the product's client against the fake and the real driver."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda_fake import GpuNode, gpus
from tests.fakes.device_job import DeviceJob

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
ASK = Path(__file__).parent / "cuda_ask.py"
CRIU = Path(__file__).resolve().parents[2] / ".criu" / "criu"
DEVICE_BYTES = 16 << 20
MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node-1", gpus("node-1", 2))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DeviceJob]]:
    jobs: list[DeviceJob] = []

    def begin(node: GpuNode, *options: str, ready: str = "step 1 ", **environment: str) -> DeviceJob:
        jobs.append(DeviceJob(tmp_path / f"output-{len(jobs)}", {**node.environment, **environment}, *options))
        jobs[-1].wait_for(ready)
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def asking(node: GpuNode, call: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ASK, call, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **node.environment},
    )


def ask(node: GpuNode, call: str, *arguments: object) -> dict[str, Any]:
    with asking(node, call, *arguments) as asker:
        out, _ = asker.communicate(timeout=60)
    assert asker.returncode == 0, (call, out)
    answer: dict[str, Any] = json.loads(out)
    return answer


def error(node: GpuNode, call: str, *arguments: object) -> str:
    return str(ask(node, call, *arguments)["error"]).removeprefix("CUDA_").removeprefix("ERROR_")


def state(node: GpuNode, pid: int) -> int:
    answer = ask(node, "state", pid)
    assert answer["error"] == "CUDA_SUCCESS"
    return int(answer["state"])


def used(node: GpuNode) -> list[dict[str, int]]:
    """Per GPU: bytes by pid."""
    found = ask(node, "nvml")["gpus"]
    for gpu in found:
        assert gpu["used"] == sum(gpu["processes"].values())
    return [gpu["processes"] for gpu in found]


def alone(node: GpuNode, tmp_path: Path, *options: str) -> list[str]:
    """The output of an undisturbed run."""
    job = DeviceJob(tmp_path / "alone", node.environment, *options, "--pace-s", "0")
    try:
        return job.finish()
    finally:
        job.end()


# ---------------------------------------------------------------- states


def test_checkpointed_and_restored_job_computes_what_an_undisturbed_one_does(
    node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path
) -> None:
    options = ("--steps", "40", "--mib", "4", "--threads", "2", "--pinned-mib", "4", "--export")
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
    assert job.finish() == alone(node, tmp_path, *options)


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
    os.kill(job.pid, signal.SIGSTOP)
    with asking(node, "lock", job.pid, 100) as asker, asking(node, "state", job.pid) as other:
        with pytest.raises(subprocess.TimeoutExpired):
            asker.wait(1.5)
        assert other.poll() is None
        asker.kill()
        other.kill()
    os.kill(job.pid, signal.SIGCONT)
    assert state(node, job.pid) == LOCKED


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


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def device_mappings(pid: int) -> list[str]:
    return [line.split()[0] for line in maps(pid).splitlines() if line.startswith("3000")]


def open_files(pid: int) -> list[str]:
    return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]


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
    assert sum(str(devices) in name for name in open_files(job.pid)) == 3
    assert maps(job.pid).count(str(devices)) == 3
    assert "/dev/zero (deleted)" in maps(job.pid)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert not device_mappings(job.pid)
    assert str(devices) not in maps(job.pid)
    assert not [name for name in open_files(job.pid) if str(devices) in name or str(node.folder) in name]
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


# ---------------------------------------------------------------- memory mapped by the program, and the runtime


APIS = pytest.mark.parametrize(
    "way",
    [("--api", "runtime"), ("--api", "segments"), ("--mixed",), ("--mixed", "--churn")],
    ids=["runtime", "segments", "mixed", "churn"],
)


@APIS
def test_every_api_gives_the_same_output(
    node: GpuNode, start: Callable[..., DeviceJob], tmp_path: Path, way: tuple[str, ...]
) -> None:
    """Also if the job is checkpointed meanwhile."""
    options = ("--steps", "40", "--mib", "24", "--blocks", "6", "--threads", "1")
    job = start(node, *options, *way)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert used(node) == [{}, {}]
    assert not device_mappings(job.pid)
    for call in ("restore", "unlock"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert job.finish() == alone(node, tmp_path, *options)


def test_forked_child_has_no_mapped_memory(node: GpuNode, start: Callable[..., DeviceJob]) -> None:
    job = start(node, "--api", "segments", "--children", "1")
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    assert device_mappings(job.pid)
    assert not device_mappings(child)


#: The start of the programs below: a context on the first GPU, a reservation, and 4 MiB that can be mapped there.
PROGRAM = """
import ctypes as c, json, threading
rt, cu = c.CDLL("libcudart.so.13"), c.CDLL("libcuda.so.1")
n, wide = 4 << 20, c.c_uint64
rt.cudaFree(None)
def number(name, *arguments):
    into = wide()
    code = getattr(cu, name)(c.byref(into), *arguments)
    assert code == 0, (name, code)
    return wide(into.value)
pinned_on_the_first = (c.c_int * 8)(1, 0, 1, 0)
read_write = (c.c_int * 3)(1, 0, 3)
va = number("cuMemAddressReserve", wide(2 * n), wide(0), wide(0), wide(0))
handle = number("cuMemCreate", wide(n), pinned_on_the_first, wide(0))
def map(): return cu.cuMemMap(va, wide(n), wide(0), handle, wide(0))
def allow(): return cu.cuMemSetAccess(va, wide(n), read_write, wide(1))
def fill(): return cu.cuMemsetD8_v2(va, 7, wide(n))
"""


def answers(node: GpuNode, program: str) -> list[Any]:
    """Runs a program and returns the value of its last expression."""
    lines = program.strip().splitlines()
    source = "\n".join([PROGRAM, *lines[:-1], f"print(json.dumps({lines[-1]}))"])
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **node.environment},
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_mapped_memory_needs_access(node: GpuNode) -> None:
    assert answers(node, "[fill(), map(), fill(), allow(), fill()]") == [1, 0, 1, 0, 0]
    with pytest.raises(AssertionError):
        answers(node, "map()\nc.string_at(va.value, 1)\n[]")


def test_only_whole_mappings_are_unmapped_and_only_empty_reservations_freed(node: GpuNode) -> None:
    program = """
def unmap(length): return cu.cuMemUnmap(va, wide(length))
def free(): return cu.cuMemAddressFree(va, wide(2 * n))
[map(), unmap(n // 2), unmap(2 * n), free(), unmap(n), free(), free()]
"""
    assert answers(node, program) == [0, 1, 1, 1, 0, 0, 1]


def test_released_handle_is_invalid(node: GpuNode) -> None:
    program = "first = cu.cuMemRelease(handle)\n[first, cu.cuMemRelease(handle), map()]"
    assert answers(node, program) == [0, 1, 1]


def test_asynchronous_copy_is_done_when_its_stream_is_waited_for(node: GpuNode) -> None:
    program = """
right, other = number("cuStreamCreate", 1), number("cuStreamCreate", 1)
slot = number("cuMemHostAlloc", wide(n), 0)
map(), allow(), fill()
cu.cuMemcpyDtoHAsync_v2(slot, va, wide(n), right)
seen = lambda: c.string_at(slot.value, 1)[0]
[seen(), cu.cuStreamSynchronize(other), seen(), cu.cuStreamSynchronize(right), seen()]
"""
    assert answers(node, program) == [0, 0, 0, 0, 7]


def test_pending_copy_of_unmapped_memory_is_an_illegal_access(node: GpuNode) -> None:
    program = """
stream, slot = number("cuStreamCreate", 1), number("cuMemHostAlloc", wide(n), 0)
map(), allow()
[cu.cuMemcpyDtoHAsync_v2(slot, va, wide(n), stream), cu.cuMemUnmap(va, wide(n)), cu.cuStreamSynchronize(stream)]
"""
    assert answers(node, program) == [0, 0, 700]


def test_mapped_memory_has_no_ipc_handle_and_no_context(node: GpuNode) -> None:
    program = """
map(), allow()
plain = number("cuMemAlloc_v2", wide(n))
ipc = [cu.cuIpcGetMemHandle(c.create_string_buffer(64), each) for each in (va, plain)]
[*ipc, *[bool(number("cuPointerGetAttribute", 1, each).value) for each in (va, plain)]]
"""
    assert answers(node, program) == [1, 0, False, True]


def test_injected_faults_of_mapping_calls_are_returned(node: GpuNode) -> None:
    program = """
def create(): return cu.cuMemCreate(c.byref(wide()), wide(n), pinned_on_the_first, wide(0))
[create(), create()]
"""
    node.fault("create", "slow:1")  # for the call in PROGRAM
    node.fault("create", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    assert answers(node, program) == [2, 0]
    node.fault("map", "fail:CUDA_ERROR_UNKNOWN")
    node.fault("copy", "fail:CUDA_ERROR_LAUNCH_FAILED")
    node.fault("pin", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    program = """
first = [map(), map(), allow(), cu.cuMemHostAlloc(c.byref(wide()), wide(n), 0)]
[*first, cu.cuMemsetD8Async(va, 1, wide(n), None), cu.cuMemsetD8Async(va, 1, wide(n), None)]
"""
    assert answers(node, program) == [999, 0, 0, 2, 719, 0]


def test_gpu_without_virtual_memory_refuses_to_map(tmp_path: Path) -> None:
    node = GpuNode(tmp_path / "node-1", [replace(gpu, virtual_memory=False) for gpu in gpus("node-1")])
    with pytest.raises(AssertionError, match=r"'cuMemCreate', 801"):
        answers(node, "[]")


def test_errors_of_the_runtime_are_kept_per_thread(node: GpuNode) -> None:
    program = """
into, elsewhere = c.c_void_p(), []
failed = rt.cudaMalloc(c.byref(into), wide(1 << 50))
thread = threading.Thread(target=lambda: elsewhere.append(rt.cudaGetLastError()))
thread.start(), thread.join()
[failed, elsewhere[0], rt.cudaPeekAtLastError(), rt.cudaGetLastError(), rt.cudaGetLastError()]
"""
    assert answers(node, program) == [2, 0, 2, 2, 0]


def test_peer_access_is_enabled_once(node: GpuNode) -> None:
    program = """
on, off = rt.cudaDeviceEnablePeerAccess, rt.cudaDeviceDisablePeerAccess
[on(1, 0), on(1, 0), off(1), off(1), on(0, 0), on(9, 0)]
"""
    assert answers(node, program) == [0, 704, 0, 705, 101, 101]


def test_runtime_looks_up_driver_calls_by_version(node: GpuNode) -> None:
    program = """
def find(name, version):
    found, status = c.c_void_p(), c.c_int(-1)
    code = rt.cudaGetDriverEntryPointByVersion(name, c.byref(found), version, wide(0), c.byref(status))
    return [code, status.value, bool(found.value)]
[find(b"cuMemCreate", 12000), find(b"cuMemAlloc", 12000), find(b"cuNothing", 12000), find(b"cuMemCreate", 99000)[0]]
"""
    assert answers(node, program) == [[0, 0, True], [0, 0, True], [0, 1, False], 1]


def test_device_reset_frees_all_but_mapped_memory(node: GpuNode) -> None:
    program = """
map(), allow()
def free():
    free, total = wide(), wide()
    assert rt.cudaMemGetInfo(c.byref(free), c.byref(total)) == 0
    return free.value
before = free()
rt.cudaMalloc(c.byref(c.c_void_p()), wide(n))
[before - free(), rt.cudaDeviceReset(), before - free(), fill()]
"""
    assert answers(node, program) == [4 * MIB, 0, 0, 0]


def test_primary_context_exists_while_it_is_retained(node: GpuNode) -> None:
    program = """
context, active = wide(), wide()
def is_active():
    cu.cuDevicePrimaryCtxGetState(0, c.byref(wide()), c.byref(active))
    return active.value
def release(): return cu.cuDevicePrimaryCtxRelease_v2(0)
[cu.cuDevicePrimaryCtxRetain(c.byref(context), 0), release(), is_active(), release(), is_active(), release()]
"""
    assert answers(node, program) == [0, 0, 1, 0, 0, 201]


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
        with pytest.raises(subprocess.TimeoutExpired):
            asker.wait(1.5)
        asker.kill()
    assert not node.faults()
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
    options = ("--steps", "60", "--mib", "8", "--threads", "2", "--children", "1", "--pinned-mib", "4")
    expected = alone(node, tmp_path, *options)
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
            assert error(other, "unlock", outer) == "SUCCESS"
            assert used(node) == [{}, {}]
            assert used(other) == [{}, {str(outer): (mib + 32) * MIB}]
            deadline = time.monotonic() + 60
            while "DONE" not in job.lines() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert job.lines() == expected
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
