"""Allocates nearly all free memory of the first GPU on request, and frees it on request. Uses the driver without torch.

gpu_hog.py GO RELEASE [LEAVE-MIB]: the files GO and RELEASE are the requests; prints WAITING, TAKEN BYTES and FREED.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

PIECE_BYTES = 256 << 20

go, release = sys.argv[1:3]
leave_bytes = int(sys.argv[3] if len(sys.argv) > 3 else "64") << 20
cuda = ctypes.CDLL("libcuda.so.1")


def must(result: int, what: str) -> None:
    if result != 0:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(name))
        sys.exit(f"{what}: {name.value!r}")


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    must(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    return free.value


def await_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


device, context, piece = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
must(cuda.cuInit(0), "cuInit")
must(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
must(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
print("WAITING", flush=True)
await_file(go)
taken: list[int] = []
# Piece by piece, because so large a block may not be contiguous, and other processes allocate and free meanwhile.
while (room := free_bytes() - leave_bytes) > (2 << 20):
    size = min(PIECE_BYTES, room)
    if cuda.cuMemAlloc_v2(ctypes.byref(piece), ctypes.c_size_t(size)) != 0:
        break
    taken.append(size)
print(f"TAKEN {sum(taken)}", flush=True)
await_file(release)
must(cuda.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")
print("FREED", flush=True)
