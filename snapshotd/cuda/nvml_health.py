"""Counters of the GPUs' health from NVML, as plain values. Runs in a helper process alone: on a sick GPU NVML can hang.

What a GPU or a driver does not have is missing from the result: no such counter is a failure of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from snapshotd.cuda import nvml
from snapshotd.cuda.bindings import Unusable

_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
#: What is counted for each link.
_NVLINK_ERRORS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
)


class _Lost(Exception):
    pass


def readings() -> dict[str, Any]:
    """{"gpus": [{"index", "uuid", "lost", "pci", …}]}. Unusable if there is no NVML, or if it does not list the GPUs."""
    nvml.initialise()
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise Unusable(f"NVML: {error}", no_gpu=False) from error
    return {"gpus": [_reading(index) for index in range(count)]}


def _reading(index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "uuid": "", "lost": ""}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found["uuid"] = nvml.text(pynvml.nvmlDeviceGetUUID(handle))
        found.update({key: value for key, value in _values(handle).items() if value is not None})
    except (_Lost, pynvml.NVMLError) as error:
        found["lost"] = str(error)
    return found


def _values(handle: Any) -> dict[str, Any]:
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    since_load = pynvml.NVML_VOLATILE_ECC
    remapped = _asked(pynvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
    pci = _asked(pynvml.nvmlDeviceGetPciInfo, handle)
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return {
        "pci": nvml.text(pci.busId) if pci is not None else None,
        "ecc_corrected": _asked(pynvml.nvmlDeviceGetTotalEccErrors, handle, corrected, since_load),
        "ecc_uncorrected": _asked(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, since_load),
        "remapped_corrected": remapped[0],
        "remapped_uncorrected": remapped[1],
        "remap_pending": remapped[2],
        "remap_failed": remapped[3],
        "retired_pending": _asked(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle),
        "temperature_c": _asked(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "slowdown_c": _asked(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown),
        "slow_reasons": _asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "pcie_replays": _asked(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
        "pcie_width": _asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_width_max": _asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "pcie_generation": _asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_generation_max": _asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "performance_state": _asked(pynvml.nvmlDeviceGetPerformanceState, handle),
        "nvlinks": _nvlinks(handle),
    }


def _nvlinks(handle: Any) -> list[dict[str, int]]:
    """The links that the GPU has, with their state and the sum of their errors."""
    found = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _asked(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        counts = [_asked(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, kind) for kind in _NVLINK_ERRORS]
        found.append({"link": link, "up": int(state != 0), "errors": sum(count or 0 for count in counts)})
    return found


def _asked(query: Callable[..., Any], *arguments: Any) -> Any:
    """The result; None if the GPU or the driver does not have it, or cannot say. Raises _Lost."""
    try:
        return query(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise _Lost(str(error)) from error
        return None
