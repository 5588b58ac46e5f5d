"""A process that uses CUDA on command: one command per line on stdin, "ok" or the driver's error number on stdout."""

from __future__ import annotations

import ctypes
import sys
import time

MIB = 1 << 20


class Program:
    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def init(self) -> int:
        context = ctypes.c_void_p()
        return int(self.cuda.cuInit(0) or self.cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))

    def allocate(self, mib: str) -> int:
        address = ctypes.c_uint64()
        return int(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) * MIB)))

    def allocate_managed(self, mib: str) -> int:
        address = ctypes.c_uint64()
        return int(self.cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(int(mib) * MIB), 1))

    def spin(self, seconds: str) -> int:
        """A kernel that keeps the GPU busy for so long."""
        module, function, image = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p(b"spin")
        result = self.cuda.cuModuleLoadData(ctypes.byref(module), image)
        result = result or self.cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin")
        ns = ctypes.c_uint64(round(float(seconds) * 1e9))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(ns))
        return int(result or self.cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None))


if __name__ == "__main__":
    program = Program()
    for line in sys.stdin:
        name, *arguments = line.split()
        result = getattr(program, name)(*arguments)
        print("ok" if result == 0 else result, flush=True)
    time.sleep(3600)
