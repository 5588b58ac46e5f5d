"""Three ways to get device memory: the driver's plain call, the runtime's, and segments that grow as torch's do.

Calls are looked up as a linked program finds them: a preloaded library comes first. The contents are the business of whoever
asks; all three hand out memory that the driver's copies work on.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from steps import wrong

RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
SEGMENT_BYTES = 20 << 20  # of physical memory, as torch takes it for large blocks
ENTRY_POINTS_OF = 12000  # the CUDA version whose calls are asked for
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
    """Makes the runtime's calls global, unless a preloaded library has them already and one of ours is behind it."""
    for name in RUNTIMES:
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    wrong(f"none of {', '.join(RUNTIMES)} can be loaded")


class Memory(Protocol):
    def allocate(self, number: int) -> int:
        """The address of so many bytes on the device."""

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
    """One reservation as large as the GPU, into which physical memory is mapped as it is needed, handle by handle.

    Blocks lie close to each other and across the borders of handles, so a handle is shared by neighbours; it is unmapped when
    none of them is left.
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
        """A call of the driver as torch gets it: from the runtime, by version."""
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
