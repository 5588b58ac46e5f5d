"""Runs a process that maps device memory on request, call by call: `MappedMemory` starts this file as a program.

A request is a line of JSON with the call and its arguments; the answer is a line with the result or the error's name.
Addresses and handles are numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
from typing import Any

DEVICE, PINNED, READ_WRITE = 1, 1, 3
SLOT_BYTES = 2 << 20


class CudaError(Exception):
    """An error of the driver, given by its name."""


class MappedMemory:
    """Controls the process from the test. The process has a context on the first GPU."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.pid = self._child.pid

    def ask(self, call: str, *arguments: int) -> Any:
        self.begin(call, *arguments)
        return self.answer()

    def begin(self, call: str, *arguments: int) -> None:
        """Sends a request without waiting for the answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([call, *arguments]) + "\n")
        self._child.stdin.flush()

    def answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"the process ended with {self._child.wait(60)}"
        answer = json.loads(line)
        if "error" in answer:
            raise CudaError(answer["error"])
        return answer["result"]

    @property
    def output(self) -> int:
        """The descriptor from which the answer is read."""
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def end(self) -> None:
        self._child.kill()
        self._child.wait(60)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class _Calls:
    """The calls that can be requested. Lengths are bytes."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls the driver. Python integers are passed as 64 bits."""
        wide = [ctypes.c_uint64(each) if isinstance(each, int) and name != "cuInit" else each for each in arguments]
        code = getattr(self._cuda, name)(*wide)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(text.value.decode() if text.value else str(code))

    def _number(self, name: str, *arguments: Any) -> int:
        """Returns the number that a call stores in its first argument."""
        number = ctypes.c_uint64()
        self._call(name, ctypes.byref(number), *arguments)
        return number.value

    def granularity(self) -> int:
        return self._number("cuMemGetAllocationGranularity", ctypes.byref(self._properties()), 0)

    def _properties(self) -> _Properties:
        return _Properties(type=PINNED, location=DEVICE, device=0)

    def reserve(self, length: int) -> int:
        return self._number("cuMemAddressReserve", length, 0, 0, 0)

    def unreserve(self, address: int, length: int) -> None:
        self._call("cuMemAddressFree", address, length)

    def create(self, length: int) -> int:
        return self._number("cuMemCreate", length, ctypes.byref(self._properties()), 0)

    def map(self, address: int, length: int, handle: int) -> None:
        self._call("cuMemMap", address, length, 0, handle, 0)

    def access(self, address: int, length: int) -> None:
        wanted = _Access(location=DEVICE, device=0, flags=READ_WRITE)
        self._call("cuMemSetAccess", address, length, ctypes.byref(wanted), 1)

    def mapped(self, address: int, length: int) -> None:
        """Creates memory, maps it and releases the handle: the memory exists until it is unmapped."""
        handle = self.create(length)
        self.map(address, length, handle)
        self.access(address, length)
        self.release(handle)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def retain(self, address: int) -> int:
        return self._number("cuMemRetainAllocationHandle", address)

    def unmap(self, address: int, length: int) -> None:
        self._call("cuCtxSynchronize")
        self._call("cuMemUnmap", address, length)

    def plain(self, length: int) -> int:
        return self._number("cuMemAlloc_v2", length)

    def free_bytes(self) -> int:
        total = ctypes.c_size_t()
        return self._number("cuMemGetInfo_v2", ctypes.byref(total))

    def pin(self, length: int) -> int:
        return self._number("cuMemHostAlloc", length, 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def write(self, address: int, length: int, seed: int) -> None:
        """Writes bytes generated from the seed, through pinned memory and a stream."""
        self._copy("cuMemcpyHtoDAsync_v2", address, bytearray(random.Random(seed).randbytes(length)))

    def digest(self, address: int, length: int) -> str:
        content = bytearray(length)
        self._copy("cuMemcpyDtoHAsync_v2", address, content)
        return hashlib.sha256(content).hexdigest()

    def _copy(self, name: str, address: int, content: bytearray) -> None:
        stream, slot = self._number("cuStreamCreate", 1), self.pin(SLOT_BYTES)
        for start in range(0, len(content), SLOT_BYTES):
            part = content[start : start + SLOT_BYTES]
            if name == "cuMemcpyHtoDAsync_v2":
                ctypes.memmove(slot, bytes(part), len(part))
                self._call(name, address + start, slot, len(part), stream)
            else:
                self._call(name, slot, address + start, len(part), stream)
            self._call("cuStreamSynchronize", stream)
            content[start : start + SLOT_BYTES] = ctypes.string_at(slot, len(part))
        self.unpin(slot)
        self._call("cuStreamDestroy_v2", stream)


def main() -> None:
    calls = _Calls()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(calls, name)(*arguments)}
        except CudaError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
