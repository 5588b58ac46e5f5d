"""The CUDA driver's memory calls that copying and filling held memory need, through ctypes.

Loaded in the processes that copy and fill alone. Calls release the interpreter's lock, so each thread may have its own under
way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import UUID

_u64, _size = ctypes.c_uint64, ctypes.c_size_t
_POSIX_DESCRIPTOR = 1
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_PORTABLE, _NON_BLOCKING = 1, 1


class DriverError(Exception):
    """A call failed; the text names it."""


class _Location(ctypes.Structure):
    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Property(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_: ClassVar = [("location", _Location), ("flags", ctypes.c_int)]


class Gpu:
    """One GPU, in its primary context."""

    def __init__(self, uuid: str) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"libcuda.so.1 cannot be loaded: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        self.device = self._find(uuid)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ctypes.c_int(self.device))
        self.enter()

    def enter(self) -> None:
        """To be called by every thread."""
        self._call("cuCtxSetCurrent", self._context)

    def pinned(self, size_bytes: int) -> int:
        """The address of new pinned memory."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), _size(size_bytes), ctypes.c_uint(_PORTABLE))
        assert address.value is not None
        return address.value

    def pin(self, address: int, size_bytes: int) -> None:
        """Pins memory of this process."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(size_bytes), ctypes.c_uint(_PORTABLE))

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream

    def map(self, descriptor: int, size_bytes: int) -> int:
        """Imports physical memory and maps it; the address."""
        handle = _u64()
        self._call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_POSIX_DESCRIPTOR),
        )
        return self._mapped(handle, size_bytes)

    def create(self, size_bytes: int) -> tuple[int, int]:
        """New physical memory: the address at which it is mapped, and a descriptor that keeps it."""
        handle, descriptor = _u64(), ctypes.c_int()
        wanted = _Property(type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=_Location(_ON_DEVICE, self.device))
        self._call("cuMemCreate", ctypes.byref(handle), _size(size_bytes), ctypes.byref(wanted), _u64(0))
        self._call(
            "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, ctypes.c_int(_POSIX_DESCRIPTOR), _u64(0)
        )
        try:
            return self._mapped(handle, size_bytes), descriptor.value
        except BaseException:
            os.close(descriptor.value)
            raise

    def _mapped(self, handle: ctypes.c_uint64, size_bytes: int) -> int:
        """Takes the handle over; the address."""
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size_bytes), _size(0), _u64(0), _u64(0))
        self._call("cuMemMap", address, _size(size_bytes), _size(0), handle, _u64(0))
        access = _Access(_Location(_ON_DEVICE, self.device), _READ_AND_WRITE)
        self._call("cuMemSetAccess", address, _size(size_bytes), ctypes.byref(access), _size(1))
        self._call("cuMemRelease", handle)  # the mapping alone keeps it
        return address.value

    def copy_out(self, to: int, address: int, size_bytes: int, stream: ctypes.c_void_p) -> None:
        """Begins a copy into pinned memory."""
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(to), _u64(address), _size(size_bytes), stream)

    def copy_in(self, address: int, source: int, size_bytes: int, stream: ctypes.c_void_p) -> None:
        """Begins a copy out of pinned memory."""
        self._call("cuMemcpyHtoDAsync_v2", _u64(address), ctypes.c_void_p(source), _size(size_bytes), stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamSynchronize", stream)

    def _find(self, uuid: str) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        wanted = UUID(uuid.removeprefix("GPU-")).bytes
        for device in range(count.value):
            found = (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGetUuid_v2", ctypes.byref(found), ctypes.c_int(device))
            if bytes(found) == wanted:
                return device
        raise DriverError(f"the driver does not list GPU {uuid}")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(f"{name} answers {(text.value or b'').decode() or code}")


def chunks(blocks: Sequence[tuple[int, int]], stripe: int, stripes: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Address and bytes of each chunk of a stripe, for blocks with these addresses and bytes: the layout of
    shim/lib/memory/layout.c."""
    all_chunks = [
        (address + at, min(slot_bytes, size - at)) for address, size in blocks for at in range(0, size, slot_bytes)
    ]
    return all_chunks[stripe::stripes]
