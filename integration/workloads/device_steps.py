"""Device memory that every step changes, through the driver's own calls alone, so that it runs on the real driver and on a
stand-in; no kernels but one that keeps the GPU busy where that is asked for.

`step K DIGEST`: the digest depends on every byte the device holds and on all steps before.
"""

import argparse
import ctypes
import hashlib
import os
import threading
from typing import Any

from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=16, help="on the device, over all blocks")
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--device", type=int, default=0)
parser.add_argument("--threads", type=int, default=0, help="so many more that each work on a block of their own")
parser.add_argument("--children", type=int, default=0, help="forked after CUDA was initialised; they use none")
parser.add_argument("--pinned-mib", type=int, default=0, help="pinned host memory, through which the digests are read")
parser.add_argument("--managed-mib", type=int, default=0)
parser.add_argument("--export", action="store_true", help="makes an IPC handle of the first block")
parser.add_argument("--busy-ms", type=int, default=0, help="the GPU has so much work to do in each step")
options, _ = parser.parse_known_args()

BLOCK_BYTES = (options.mib << 20) // options.blocks
PIECE_BYTES = 4096
SPIN = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 ns)
{
    .reg .pred %again;
    .reg .u64 %wanted, %start, %now, %gone;
    ld.param.u64 %wanted, [ns];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %start;
    setp.lt.u64 %again, %gone, %wanted;
    @%again bra again;
    ret;
}
"""

ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)  # as a linked program finds them: a preloaded library comes first


def call(name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
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


def change(block: int, step: int, source: int) -> None:
    """Every byte of the block depends on the step or on what the other block held."""
    third = BLOCK_BYTES // 3 // PIECE_BYTES * PIECE_BYTES
    call("cuMemsetD32_v2", place(block), ctypes.c_uint(0x9E3779B9 * (step + 1) & 0xFFFFFFFF), size(third // 4))
    call("cuMemcpyDtoD_v2", place(block + third), place(source), size(third))
    call("cuMemsetD8_v2", place(block + 2 * third), ctypes.c_ubyte(step % 251), size(PIECE_BYTES))
    piece = hashlib.sha256(b"%d" % step).digest() * (PIECE_BYTES // 32)
    call("cuMemcpyHtoD_v2", place(block + step % 16 * 32), piece, size(PIECE_BYTES))


def contents(block: int, into: Any) -> bytes:
    call("cuMemcpyDtoH_v2", into, place(block), size(BLOCK_BYTES))
    return ctypes.string_at(into, BLOCK_BYTES)


def serve(reads: int, writes: int) -> None:
    """A forked child: answers every digest with one of its own, which depends on all before."""
    own = b""
    while word := os.read(reads, 32):
        own = hashlib.sha256(own + word).digest()
        os.write(writes, own)
    os._exit(0)


def fork_child() -> tuple[int, int]:
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    if os.fork() == 0:
        os.close(ask)
        serve(asked, answered)
    os.close(asked)
    os.close(answered)
    os.set_inheritable(ask, False)
    return ask, answer


class Worker(threading.Thread):
    """Changes its own block when told to, and takes its digest."""

    def __init__(self, context: ctypes.c_void_p, number: int) -> None:
        super().__init__(daemon=True)
        self.context = context
        self.number = number
        self.go = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.digest = b""
        self.step = 0

    def run(self) -> None:
        call("cuCtxSetCurrent", self.context)
        block = allocate("cuMemAlloc_v2", BLOCK_BYTES)
        call("cuMemsetD8_v2", place(block), ctypes.c_ubyte(self.number), size(BLOCK_BYTES))
        into = ctypes.create_string_buffer(BLOCK_BYTES)
        while True:
            self.go.acquire()
            change(block, self.step + self.number, block)
            self.digest = hashlib.sha256(self.digest + contents(block, into)).digest()
            self.done.release()


call("cuInit", 0)
device = ctypes.c_int()
call("cuDeviceGet", ctypes.byref(device), options.device)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
blocks = [allocate("cuMemAlloc_v2", BLOCK_BYTES) for _ in range(options.blocks)]
for number, block in enumerate(blocks):
    call("cuMemsetD8_v2", place(block), ctypes.c_ubyte(number + 1), size(BLOCK_BYTES))
into: Any = ctypes.create_string_buffer(BLOCK_BYTES)
pinned = ctypes.c_void_p()
if options.pinned_mib:
    call("cuMemHostAlloc", ctypes.byref(pinned), size(max(options.pinned_mib << 20, BLOCK_BYTES)), 0)
    into = pinned
if options.managed_mib:
    allocate("cuMemAllocManaged", options.managed_mib << 20, 1)
if options.export:
    call("cuIpcGetMemHandle", ctypes.create_string_buffer(64), place(blocks[0]))
module, spin = ctypes.c_void_p(), ctypes.c_void_p()
if options.busy_ms:
    call("cuModuleLoadData", ctypes.byref(module), SPIN)
    call("cuModuleGetFunction", ctypes.byref(spin), module, b"spin")
busy_ns = ctypes.c_uint64(options.busy_ms * 1_000_000)
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(busy_ns))
children = [fork_child() for _ in range(options.children)]
workers = [Worker(context, number) for number in range(options.threads)]
for worker in workers:
    worker.start()

digest = b""
print(f"READY {options.mib} MiB in {options.blocks} blocks", flush=True)
for step in steps():
    if options.busy_ms:
        call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
        print("busy", step, flush=True)
    for number, block in enumerate(blocks):
        change(block, step + number, blocks[number - 1])
    call("cuCtxSynchronize")
    for worker in workers:
        worker.step = step
        worker.go.release()
    for block in blocks:
        digest = hashlib.sha256(digest + contents(block, into)).digest()
    for worker in workers:
        worker.done.acquire()
        digest = hashlib.sha256(digest + worker.digest).digest()
    for ask, answer in children:
        os.write(ask, digest)
        digest = hashlib.sha256(digest + os.read(answer, 32)).digest()
    say(step, digest.hex()[:16])
