"""Memory that a program maps itself, and the runtime, behave in the fake as was measured on the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda_asking import (
    MIB,
    alone,
    device_mappings,
    error,
    used,
)
from tests.fakes.cuda_fake import GpuNode, gpus
from tests.fakes.device_job import DeviceJob

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
    options = ("--mib", "24", "--blocks", "6", "--threads", "1")
    job = start(node, *options, *way)
    for call in ("lock", "checkpoint"):
        assert error(node, call, job.pid) == "SUCCESS"
    assert used(node) == [{}, {}]
    assert not device_mappings(job.pid)
    for call in ("restore", "unlock"):
        assert error(node, call, job.pid) == "SUCCESS"
    steps = job.end_soon()
    assert job.finish() == alone(node, tmp_path, *options, *steps)


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
