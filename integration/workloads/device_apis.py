"""Allocates device memory in three ways: with the driver, with the runtime, and in segments that grow as torch's do.

Functions are looked up as in a linked program: a preloaded library comes first. The driver's copies work on the memory
of all three. The caller defines its contents.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from steps import wrong

RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
SEGMENT_BYTES = 20 << 20  # of physical memory, as torch allocates it for large blocks
ENTRY_POINTS_OF = 12000  # the CUDA version whose functions are requested
VIRTUAL_MEMORY_WITH_RDMA = 110

ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)


def call(name: str, *arguments: Any) -> None:
    check(name, getattr(cuda, name)(*arguments))


def check(name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        wrong(f"{name}: {text.value.decode() if text.value else code}")


def size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def place(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


def allocate(kind: str, number: int, *more: Any) -> int:
    address = ctypes.c_uint64()
    call(kind, ctypes.byref(address), size(number), *more)
    return address.value


def load_runtime() -> None:
    """Loads the runtime with global symbols. Symbols of a preloaded library still come first."""
    for name in RUNTIMES:
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    wrong(f"none of {', '.join(RUNTIMES)} can be loaded")


class Memory(Protocol):
    def allocate(self, number: int) -> int:
        """Returns the address of so many new bytes on the device."""

    def free(self, address: int) -> None: ...


class DriverMemory:
    def allocate(self, number: int) -> int:
        return allocate("cuMemAlloc_v2", number)

    def free(self, address: int) -> None:
        call("cuMemFree_v2", place(address))


class RuntimeMemory:
    def allocate(self, number: int) -> int:
        return allocate("cudaMalloc", number)

    def free(self, address: int) -> None:
        call("cudaFree", place(address))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class SegmentMemory:
    """Reserves addresses for the whole GPU and maps physical memory into them on demand, handle by handle.

    Blocks are adjacent and cross the boundaries of handles, so neighbours share a handle. A handle is unmapped when its
    last block is freed.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._calls: dict[str, Callable[..., int]] = {}
        total = ctypes.c_size_t()
        call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        whole = -(-total.value * 9 // 8 // SEGMENT_BYTES) * SEGMENT_BYTES
        self._base = ctypes.c_uint64()
        self._driver("cuMemAddressReserve", ctypes.byref(self._base), size(whole), size(0), place(0), place(0))
        self._blocks: dict[int, int] = {}  # address to bytes
        self._handles: dict[int, ctypes.c_uint64] = {}  # by number of the segment
        rdma = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(rdma), VIRTUAL_MEMORY_WITH_RDMA, device)
        self._rdma = rdma.value

    def allocate(self, number: int) -> int:
        end = max((address + held for address, held in self._blocks.items()), default=self._base.value)
        address = -(-end // 512) * 512
        self._blocks[address] = number
        for segment in self._segments(address, number):
            if segment not in self._handles:
                self._map(segment)
        return address

    def free(self, address: int) -> None:
        gone = self._segments(address, self._blocks.pop(address))
        used = {segment for other, held in self._blocks.items() for segment in self._segments(other, held)}
        call("cuCtxSynchronize")
        for segment in set(gone) - used:
            self._driver("cuMemUnmap", self._place(segment), size(SEGMENT_BYTES))
            self._driver("cuMemRelease", self._handles.pop(segment))

    def _segments(self, address: int, number: int) -> range:
        first = (address - self._base.value) // SEGMENT_BYTES
        return range(first, (address - self._base.value + number - 1) // SEGMENT_BYTES + 1)

    def _place(self, segment: int) -> ctypes.c_uint64:
        return place(self._base.value + segment * SEGMENT_BYTES)

    def _map(self, segment: int) -> None:
        handle = ctypes.c_uint64()
        properties = _Properties(type=1, location=1, device=self._device, rdma=self._rdma)
        access = _Access(location=1, device=self._device, flags=3)
        self._driver("cuMemCreate", ctypes.byref(handle), size(SEGMENT_BYTES), ctypes.byref(properties), place(0))
        self._driver("cuMemMap", self._place(segment), size(SEGMENT_BYTES), size(0), handle, place(0))
        self._driver("cuMemSetAccess", self._place(segment), size(SEGMENT_BYTES), ctypes.byref(access), size(1))
        self._handles[segment] = handle

    def _driver(self, name: str, *arguments: Any) -> None:
        """Looks up a function of the driver as torch does: through the runtime, by version."""
        if name not in self._calls:
            found, status = ctypes.c_void_p(), ctypes.c_int(-1)
            call(
                "cudaGetDriverEntryPointByVersion",
                name.encode(),
                ctypes.byref(found),
                ctypes.c_uint(ENTRY_POINTS_OF),
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
            address: int = found.value or wrong(f"{name}: the runtime does not find it ({status.value})")
            self._calls[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        check(name, self._calls[name](*arguments))
