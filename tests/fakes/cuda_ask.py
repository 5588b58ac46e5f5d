"""Makes one call of the driver's checkpoint API or of NVML: `python cuda_ask.py CALL [PID] [ARGUMENT…]`.

It has its own ctypes declarations, so that tests of the fakes do not share the product's mistakes. Prints the answer as
JSON: the error's name, and the result.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any
from uuid import UUID

cuda = ctypes.CDLL("libcuda.so.1")


def name_of(code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return text.value.decode() if text.value else str(code)


def state(pid: int) -> dict[str, Any]:
    value = ctypes.c_int(-1)
    code = cuda.cuCheckpointProcessGetState(pid, ctypes.byref(value))
    return {"error": name_of(code), "state": value.value}


def lock(pid: int, timeout_ms: str = "10000") -> dict[str, Any]:
    arguments = (ctypes.c_uint * 16)(int(timeout_ms))
    return {"error": name_of(cuda.cuCheckpointProcessLock(pid, ctypes.byref(arguments)))}


def checkpoint(pid: int) -> dict[str, Any]:
    return {"error": name_of(cuda.cuCheckpointProcessCheckpoint(pid, None))}


def restore(pid: int, *pairs: str) -> dict[str, Any]:
    """Each pair is OLD=NEW."""
    if not pairs:
        return {"error": name_of(cuda.cuCheckpointProcessRestore(pid, None))}
    flat = b"".join(UUID(uuid.removeprefix("GPU-")).bytes for pair in pairs for uuid in pair.split("="))
    listed = ctypes.create_string_buffer(flat, len(flat))
    arguments = (ctypes.c_uint64 * 8)(ctypes.addressof(listed), len(pairs))
    return {"error": name_of(cuda.cuCheckpointProcessRestore(pid, ctypes.byref(arguments)))}


def unlock(pid: int) -> dict[str, Any]:
    return {"error": name_of(cuda.cuCheckpointProcessUnlock(pid, None))}


def restore_thread(pid: int) -> dict[str, Any]:
    value = ctypes.c_int(-1)
    return {"error": name_of(cuda.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(value))), "tid": value.value}


def nvml(_: int) -> dict[str, Any]:
    """What NVML reports about every GPU."""
    import pynvml as nv

    nv.nvmlInit()
    handles = [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]
    found = {
        "driver": nv.nvmlSystemGetDriverVersion(),
        "cuda": nv.nvmlSystemGetCudaDriverVersion(),
        "gpus": [
            {
                "uuid": nv.nvmlDeviceGetUUID(handle),
                "name": nv.nvmlDeviceGetName(handle),
                "minor": nv.nvmlDeviceGetMinorNumber(handle),
                "capability": nv.nvmlDeviceGetCudaComputeCapability(handle),
                "total": nv.nvmlDeviceGetMemoryInfo(handle).total,
                "used": nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2).used,
                "mig": nv.nvmlDeviceGetMigMode(handle),
                "processes": {p.pid: p.usedGpuMemory for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)},
                "mps": [p.pid for p in nv.nvmlDeviceGetMPSComputeRunningProcesses(handle)],
            }
            for handle in handles
        ],
    }
    nv.nvmlShutdown()
    return found


CALLS = {call.__name__: call for call in (state, lock, checkpoint, restore, unlock, restore_thread, nvml)}

if __name__ == "__main__":
    verb, pid, *rest = [*sys.argv[1:], "0"] if len(sys.argv) == 2 else sys.argv[1:]
    print(json.dumps(CALLS[verb](int(pid), *rest)))
