"""Vectors on which NCCL works, in host memory or in device memory on the fakes, and device memory that every step changes."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from ctypes import c_size_t, c_void_p
from typing import Any

import xxhash

WORDS = 64
BLOCKS = 4  # of device memory
TO_DEVICE, TO_HOST = 1, 2


class Words:
    """A vector that NCCL reads and writes in place."""

    def __init__(self, count: int = WORDS, values: array[int] | None = None) -> None:
        self.values = array("Q", values if values is not None else bytes(8 * count))

    @property
    def address(self) -> c_void_p:
        return c_void_p(self.values.buffer_info()[0])

    def read(self) -> array[int]:
        return self.values


class Device:
    """Blocks of device memory. The first one contains the vectors that NCCL works on."""

    SLOT_BYTES, SLOTS = 4096, 64

    def __init__(self, mib: int, rank: int) -> None:
        import device_apis

        self._call = device_apis.call
        device_apis.load_runtime()
        memory: Any = device_apis.RuntimeMemory()
        self.block_bytes = (mib << 20) // BLOCKS
        self.blocks: list[int] = [memory.allocate(self.block_bytes) for _ in range(BLOCKS)]
        self._slots, self._read = 0, ctypes.create_string_buffer(self.block_bytes)
        for number, block in enumerate(self.blocks):
            pattern = hashlib.sha256(b"%d %d" % (rank, number)).digest()
            self.put(block, pattern * (self.block_bytes // len(pattern)))

    def slot(self) -> int:
        self._slots += 1
        return self.blocks[0] + self._slots % self.SLOTS * self.SLOT_BYTES

    def put(self, address: int, content: bytes) -> None:
        self._call("cudaMemcpy", c_void_p(address), content, c_size_t(len(content)), TO_DEVICE)

    def get(self, address: int, count: int, into: Any = None) -> Any:
        """Returns the bytes at an address, in `into` or a new buffer."""
        into = into or ctypes.create_string_buffer(count)
        self._call("cudaMemcpy", into, c_void_p(address), c_size_t(count), TO_HOST)
        return into

    def turn(self, step: int, state: bytes) -> bytes:
        """Changes every block, and returns a checksum of their complete contents."""
        for number, block in enumerate(self.blocks):
            places = self.block_bytes // self.SLOT_BYTES - self.SLOTS
            self.put(block + (self.SLOTS + (step * 37 + number) % places) * self.SLOT_BYTES, state)
        made = xxhash.xxh3_128()
        for block in self.blocks:
            made.update(self.get(block, self.block_bytes, self._read))
        return made.digest()


class DeviceWords(Words):
    """The same vector, on the device."""

    def __init__(self, device: Device, count: int, values: array[int] | None = None) -> None:
        super().__init__(count, values)
        self._device, self._at, self._bytes = device, device.slot(), 8 * len(self.values)
        device.put(self._at, self.values.tobytes())

    @property
    def address(self) -> c_void_p:
        return c_void_p(self._at)

    def read(self) -> array[int]:
        return array("Q", self._device.get(self._at, self._bytes).raw)
