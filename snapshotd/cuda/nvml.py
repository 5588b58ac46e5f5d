"""What NVML tells about the node's GPUs, as plain values. Runs in the helper process alone: NVML can hang too.

One GPU that does not answer must not hide the others: its error is told beside what is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pynvml

from snapshotd.cuda.bindings import Unusable

_once = threading.Lock()
_initialised = False

#: nvmlInit's answers that mean: no GPU here.
_NO_GPU = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def look() -> dict[str, Any]:
    """{"driver_version", "gpus": […], "problem"}, as inventory.from_answer reads it. Unusable where there is no NVML."""
    global _initialised
    with _once:
        if not _initialised:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unusable(f"NVML: {error}", no_gpu=error.value in _NO_GPU) from error
            _initialised = True
    gpus, problems = [], []
    try:
        driver_version = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise Unusable(f"NVML: {error}", no_gpu=False) from error
    for index in range(count):
        try:
            gpus.append(_gpu(index))
        except pynvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    return {"driver_version": driver_version, "gpus": gpus, "problem": "; ".join(problems)}


def _gpu(index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    mig = _where_supported(pynvml.nvmlDeviceGetMigMode, handle)
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "index": index,
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "compute_capability": f"{major}.{minor}",
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.free),
        "mig": mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        "processes": _processes(handle),
    }


def _processes(handle: Any) -> list[dict[str, Any]]:
    """Who computes on it, each once: a client of the multi-process service may be in both of NVML's lists."""
    lists = (pynvml.nvmlDeviceGetComputeRunningProcesses, False), (pynvml.nvmlDeviceGetMPSComputeRunningProcesses, True)
    by_pid = {}
    for ask, mps in lists:
        for each in _where_supported(ask, handle) or ():
            by_pid[each.pid] = {"pid": each.pid, "memory_bytes": each.usedGpuMemory or 0, "mps": mps}
    return [by_pid[pid] for pid in sorted(by_pid)]


def _where_supported(ask: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, None from a GPU or driver that does not know the question."""
    try:
        return ask(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
