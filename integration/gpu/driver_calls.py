"""Makes the driver's checkpoint calls for the baseline of `bench_gpu`.

Reads lines `CALL PID` (lock, checkpoint, restore, unlock) and answers each with `SECONDS ERROR`; the error is empty on
success. It uses no code of the product, because a baseline must be independent of what is measured. One process makes
all calls, because attaching to the driver takes seconds.
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
