"""The driver's checkpoint calls as a person would make them by hand: the yardstick of `bench_gpu`.

Reads lines `CALL PID` (lock, checkpoint, restore, unlock) and answers each with `SECONDS ERROR`, the error empty if it went
well. Nothing of the product is in here: a yardstick must not share what it measures. One process for all calls, because
a fresh attach to the driver costs seconds.
"""

from __future__ import annotations

import ctypes
import sys
import time

# typedef struct { unsigned int timeoutMs; unsigned int reserved0; cuuint64_t reserved1[7]; } CUcheckpointLockArgs;
LOCK_ARGUMENTS = (ctypes.c_uint * 16)(60_000)
CALLS = {
    "lock": ("cuCheckpointProcessLock", LOCK_ARGUMENTS),
    "checkpoint": ("cuCheckpointProcessCheckpoint", None),
    "restore": ("cuCheckpointProcessRestore", None),
    "unlock": ("cuCheckpointProcessUnlock", None),
}


def main() -> int:
    cuda = ctypes.CDLL("libcuda.so.1")
    if code := cuda.cuInit(0):
        sys.exit(f"cuInit: {code}")
    print("READY", flush=True)
    for line in sys.stdin:
        name, pid = line.split()
        function, arguments = CALLS[name]
        began = time.monotonic()
        code = getattr(cuda, function)(int(pid), arguments)
        seconds = time.monotonic() - began
        text = ctypes.c_char_p()
        if code:
            cuda.cuGetErrorName(code, ctypes.byref(text))
        print(f"{seconds:.6f} {text.value.decode() if text.value else code or ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
