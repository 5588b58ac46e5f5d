"""A process that shares device memory with its parent, device_steps.py (CUDA IPC): each opens a block of the other.

In every step both change both blocks, and compare what they find in them. Started as a program it is the child. The parent
makes the same changes alone where no process can open what another one has exported, so its digests are the same.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import device_apis as apis
import xxhash
from device_apis import call, place, size
from steps import wrong

_FOR_OTHERS = 2 | 4  # events that other processes can open cannot measure time
_LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def begin(device: int) -> None:
    apis.load_runtime()
    call("cudaSetDevice", device)
    call("cudaFree", None)


def exported(block: int) -> str:
    handle = Handle()
    call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(block))
    return bytes(handle).hex()


def opened(text: str) -> int:
    """The address; 0: this driver opens no memory of other processes."""
    address = ctypes.c_void_p()
    handle = Handle.from_buffer_copy(bytes.fromhex(text))
    if apis.cuda.cudaIpcOpenMemHandle(ctypes.byref(address), handle, _LAZY_PEER_ACCESS):
        return 0
    return address.value or 0


def change(step: int, block: int, other: int, held: int) -> None:
    """What the child does to its own block and the parent's."""
    piece = held // 64
    there = step * 13 % 64 * piece
    call("cuMemsetD8_v2", place(other + there), ctypes.c_ubyte(step % 249 + 1), size(piece))
    call("cuMemcpyDtoD_v2", place(block + there), place(other + step * 5 % 64 * piece), size(piece))
    call("cuMemsetD32_v2", place(block), ctypes.c_uint(0x85EBCA6B * (step + 1) & 0xFFFFFFFF), size(256))
    call("cuCtxSynchronize")


def digest(block: int, into: Any, held: int) -> str:
    call("cuMemcpyDtoH_v2", into, place(block), size(held))
    return str(xxhash.xxh3_128(into).hexdigest())


class Guest:
    """The child, as its parent sees it."""

    def __init__(self, memory: apis.Memory, block: int, held: int, device: int) -> None:
        self._block, self._held = block, held
        self._into = ctypes.create_string_buffer(held)
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, __file__, str(held), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.theirs = opened(self._ask(exported(block)))
        if not self.theirs:
            self._child.kill()
            self._child.wait()
            self._child = None
            self.theirs = memory.allocate(held)
            call("cuMemsetD8_v2", place(self.theirs), ctypes.c_ubyte(9), size(held))

    def _ask(self, line: str) -> str:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(line, file=self._child.stdin, flush=True)
        return self._child.stdout.readline().strip() or wrong("the child has ended")

    def turn(self, step: int, before: bytes) -> bytes:
        """A digest of `before`, the parent's block and the child's."""
        said = ""
        if self._child is None:
            change(step, self.theirs, self._block, self._held)
        else:
            event, handle = ctypes.c_void_p(), Handle()
            call("cudaEventCreateWithFlags", ctypes.byref(event), _FOR_OTHERS)
            call("cudaEventRecord", event, None)
            call("cudaIpcGetEventHandle", ctypes.byref(handle), event)
            said = self._ask(f"{step} {bytes(handle).hex()}")
            call("cudaEventDestroy", event)
        found = f"{digest(self._block, self._into, self._held)} {digest(self.theirs, self._into, self._held)}"
        if said and said != found:
            wrong(f"step {step}: the child finds {said}, the parent {found}")
        return xxhash.xxh3_128(before + found.encode()).digest()


def main() -> None:
    held, device = map(int, sys.argv[1:])
    begin(device)
    block = apis.RuntimeMemory().allocate(held)
    call("cuMemsetD8_v2", place(block), ctypes.c_ubyte(9), size(held))
    other = opened(sys.stdin.readline().strip())
    print(exported(block), flush=True)
    into = ctypes.create_string_buffer(held)
    for line in sys.stdin:
        step, text = line.split()
        event = ctypes.c_void_p()
        call("cudaIpcOpenEventHandle", ctypes.byref(event), Handle.from_buffer_copy(bytes.fromhex(text)))
        call("cudaStreamWaitEvent", None, event, 0)
        call("cudaEventDestroy", event)
        change(int(step), block, other, held)
        print(digest(other, into, held), digest(block, into, held), flush=True)


if __name__ == "__main__":
    main()
