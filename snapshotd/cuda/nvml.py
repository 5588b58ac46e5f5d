"""The inventory of the node's GPUs from NVML, as plain values. Runs in the helper process alone: NVML can hang too.

One GPU that does not answer must not hide the others: its error is reported beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pynvml

from snapshotd.cuda.bindings import Unusable

_once = threading.Lock()
_initialised = False

#: Errors of nvmlInit that mean that the node has no GPU.
_NO_GPU = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def inventory() -> dict[str, Any]:
    """{"driver_version", "gpus": […], "problem"}, as inventory.from_answer expects it. Unusable if there is no NVML."""
    initialise()
    gpus, problems = [], []
    try:
        driver_version = text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise Unusable(f"NVML: {error}", no_gpu=False) from error
    for index in range(count):
        try:
            gpus.append(_gpu(index))
        except pynvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    return {"driver_version": driver_version, "gpus": gpus, "problem": "; ".join(problems)}


def initialise() -> None:
    """Unusable if there is no NVML."""
    global _initialised
    with _once:
        if not _initialised:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unusable(f"NVML: {error}", no_gpu=error.value in _NO_GPU) from error
            _initialised = True


def _gpu(index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    mig = _where_supported(pynvml.nvmlDeviceGetMigMode, handle)
    return {
        "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
        "index": index,
        "name": text(pynvml.nvmlDeviceGetName(handle)),
        "compute_capability": f"{major}.{minor}",
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.free),
        "mig": mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        "processes": _processes(handle),
        "persistence": _persistence(handle),
        "bus_id": _bus_id(handle),
    }


def _bus_id(handle: Any) -> str:
    """As CUDA writes it, with four digits of the domain where NVML writes eight; empty if NVML does not say."""
    try:
        name = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    except pynvml.NVMLError:
        return ""
    domain, _, rest = name.partition(":")
    return f"{domain[-4:]}:{rest}"


def _persistence(handle: Any) -> bool | None:
    """Only for the doctor: a GPU is not given up because it does not answer this."""
    try:
        return bool(pynvml.nvmlDeviceGetPersistenceMode(handle) == pynvml.NVML_FEATURE_ENABLED)
    except pynvml.NVMLError:
        return None


def _processes(handle: Any) -> list[dict[str, Any]]:
    """The processes that use it, each once: a client of the multi-process service may be in both of NVML's lists."""
    lists = (pynvml.nvmlDeviceGetComputeRunningProcesses, False), (pynvml.nvmlDeviceGetMPSComputeRunningProcesses, True)
    by_pid = {}
    for query, mps in lists:
        for each in _where_supported(query, handle) or ():
            by_pid[each.pid] = {"pid": each.pid, "memory_bytes": each.usedGpuMemory or 0, "mps": mps}
    return [by_pid[pid] for pid in sorted(by_pid)]


def _where_supported(query: Callable[[Any], Any], handle: Any) -> Any:
    """The result, None if the GPU or driver does not support the call."""
    try:
        return query(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
