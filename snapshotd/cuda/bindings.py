"""The CUDA driver's process checkpoint, through ctypes: the functions of libcuda.so.1, and errors by the driver's names.

Loaded in the helper process alone: any of these calls can hang for ever (a stopped process does not answer). Calls release
the interpreter's lock, so each may run in its own thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

LIBRARY = "libcuda.so.1"

#: cuDriverGetVersion() of the first driver (r580) whose restore takes pairs of GPUs; the field was reserved before.
PAIRS_SINCE = 13000

SUCCESS = "CUDA_SUCCESS"


class DriverError(Exception):
    """The driver returned an error. `name` is the driver's name for it, such as CUDA_ERROR_ILLEGAL_STATE."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Unusable(Exception):
    """There is no usable driver. `no_gpu`: because the node has no GPU, which is not an error."""

    def __init__(self, reason: str, *, no_gpu: bool) -> None:
        super().__init__(reason)
        self.no_gpu = no_gpu


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs. All argument structures are 64 bytes; reserved fields must be zero."""

    _fields_: ClassVar = [
        ("timeoutMs", ctypes.c_uint),  # 0: no limit
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Uuid(ctypes.Structure):
    """CUuuid"""

    _fields_: ClassVar = [("bytes", ctypes.c_ubyte * 16)]


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair"""

    _fields_: ClassVar = [("oldUuid", Uuid), ("newUuid", Uuid)]


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs as of r580; in r570 all 64 bytes were reserved, so NULL is passed there."""

    _fields_: ClassVar = [
        ("gpuPairs", ctypes.POINTER(GpuPair)),
        ("gpuPairsCount", ctypes.c_uint),
        ("reserved", ctypes.c_char * (64 - ctypes.sizeof(ctypes.c_void_p) - ctypes.sizeof(ctypes.c_uint))),
    ]


@dataclass(frozen=True)
class Function:
    name: str
    arguments: tuple[Any, ...]


#: All functions used. All return a CUresult. A driver that lacks one is too old for the calls that need it.
FUNCTIONS = (
    # CUresult cuInit(unsigned int Flags)
    Function("cuInit", (ctypes.c_uint,)),
    # CUresult cuDriverGetVersion(int *driverVersion)
    Function("cuDriverGetVersion", (ctypes.POINTER(ctypes.c_int),)),
    # CUresult cuGetErrorName(CUresult error, const char **pStr)
    Function("cuGetErrorName", (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))),
    # CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
    Function("cuCheckpointProcessGetState", (ctypes.c_int, ctypes.POINTER(ctypes.c_int))),
    # CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
    Function("cuCheckpointProcessLock", (ctypes.c_int, ctypes.POINTER(LockArgs))),
    # CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
    Function("cuCheckpointProcessCheckpoint", (ctypes.c_int, ctypes.c_void_p)),
    # CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
    Function("cuCheckpointProcessRestore", (ctypes.c_int, ctypes.POINTER(RestoreArgs))),
    # CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
    Function("cuCheckpointProcessUnlock", (ctypes.c_int, ctypes.c_void_p)),
    # CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
    Function("cuCheckpointProcessGetRestoreThreadId", (ctypes.c_int, ctypes.POINTER(ctypes.c_int))),
)

#: Errors of cuInit that mean that the node has no GPU.
_NO_GPU = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")


class Driver:
    """libcuda.so.1, loaded and initialised. Unusable if that fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            absent = "No such file" in str(error)  # otherwise it exists, for another architecture for example
            raise Unusable(f"{LIBRARY} cannot be loaded: {error}", no_gpu=absent) from error
        for function in FUNCTIONS:
            entry = getattr(self._library, function.name, None)
            if entry is not None:
                entry.argtypes, entry.restype = function.arguments, ctypes.c_int
        try:
            self._call("cuInit", 0)
            version = ctypes.c_int()
            self._call("cuDriverGetVersion", ctypes.byref(version))
        except DriverError as error:
            raise Unusable(f"the CUDA driver cannot be used: {error.name}", no_gpu=error.name in _NO_GPU) from error
        self.version = version.value

    def _call(self, name: str, *arguments: Any) -> None:
        entry = getattr(self._library, name, None)
        if entry is None:
            raise Unusable(f"this driver has no {name}: it is older than r570", no_gpu=False)
        code = entry(*arguments)
        if code:
            raise DriverError(self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) or text.value is None:
            return f"CUDA_ERROR_{code}"
        return text.value.decode()

    def state(self, pid: int) -> int:
        """CUprocessState: 0 running, 1 locked, 2 checkpointed, 3 failed."""
        state = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        return state.value

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Waits until the process's GPU work is done and lets it start no more."""
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(LockArgs(timeoutMs=max(1, timeout_ms))))

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        """Leaves the process locked. `pairs` (old and new UUID) lists every GPU of the node, or none."""
        if not pairs or (self.version < PAIRS_SINCE and all(old == new for old, new in pairs)):
            self._call("cuCheckpointProcessRestore", pid, None)
            return
        if self.version < PAIRS_SINCE:
            raise Unusable("this driver cannot restore onto another GPU: it is older than r580", no_gpu=False)
        listed = (GpuPair * len(pairs))(*(GpuPair(_uuid(old), _uuid(new)) for old, new in pairs))
        arguments = RestoreArgs(gpuPairs=listed, gpuPairsCount=len(pairs))
        self._call("cuCheckpointProcessRestore", pid, ctypes.byref(arguments))

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def restore_thread(self, pid: int) -> int:
        """The thread in which the driver works, numbered as in the process's own pid namespace."""
        thread = ctypes.c_int()
        self._call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(thread))
        return thread.value


def _uuid(text: str) -> Uuid:
    """ "GPU-0d5ac1e4-…" in the driver's format."""
    return Uuid((ctypes.c_ubyte * 16)(*UUID(text.removeprefix("GPU-")).bytes))
