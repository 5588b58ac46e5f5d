"""Changes device memory in every step, by copies and fills only, so that it runs on the real driver and on the fake.

The only kernel is an optional one that keeps the GPU busy. In `step K DIGEST` the digest depends on every byte on the
device and on all previous steps. It does not depend on how the memory was allocated (`--api`, `--mixed`). Most of the
contents look random; some megabytes are zero, and some are equal. Of `--zero-mib` all but the first megabyte is zero.
"""

import argparse
import ctypes
import hashlib
import os
import random
import threading
from pathlib import Path
from typing import Any

import device_apis as apis
import xxhash
from device_apis import allocate, call, place, size
from device_guest import Guest, exported, opened
from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=16, help="on the device, over all blocks")
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--device", type=int, default=0)
parser.add_argument("--threads", type=int, default=0, help="so many more that each work on a block of their own")
parser.add_argument("--children", type=int, default=0, help="forked after CUDA was initialised; they use none")
parser.add_argument("--pinned-mib", type=int, default=0, help="pinned host memory, through which the digests are read")
parser.add_argument("--managed-mib", type=int, default=0)
parser.add_argument("--shared", type=int, default=0, help="so many child processes that share the first block")
parser.add_argument("--export", action="store_true", help="makes an IPC handle of the first block")
parser.add_argument("--lend", default="", metavar="FILE", help="writes the handle of the first block to it")
parser.add_argument(
    "--borrow", default="", metavar="FILE", help="opens the block whose handle another rank has written to it"
)
parser.add_argument("--export-when", default="", metavar="FILE", help="the same, in the step in which it is there")
parser.add_argument(
    "--api", choices=("driver", "runtime", "segments"), default="driver", help="where memory is got from"
)
parser.add_argument("--mixed", action="store_true", help="blocks come from every api in turn")
parser.add_argument("--churn", action="store_true", help="a block more is got and given back, step by step")
parser.add_argument(
    "--zero-mib", type=int, default=0, help="a block more, of which every step writes to the first alone"
)
parser.add_argument("--idle-mib", type=int, default=0, help="a block more, which is never used")
parser.add_argument("--second-gpu", action="store_true", help="a block more, on the GPU after --device")
parser.add_argument("--until", default="", metavar="FILE", help="ends after the step in which it is there")
parser.add_argument("--busy-ms", type=int, default=0, help="the GPU has so much work to do in each step")
options, _ = parser.parse_known_args()

BLOCK_BYTES = (options.mib << 20) // options.blocks
PIECE_BYTES = 4096
MIB = 1 << 20
UPLOADED_MIB = 64  # generated on the host; the rest of a large device is copied from it, at odd offsets
CHURN_BYTES = 2 * MIB + PIECE_BYTES
ZERO_BYTES = options.zero_mib * MIB
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


def change(block: int, step: int, source: int) -> None:
    """Changes a few places of the block, different ones in every step: bytes of `source`, a pattern, and new bytes."""
    slot = BLOCK_BYTES // 16 // PIECE_BYTES * PIECE_BYTES
    if slot:
        call("cuMemcpyDtoD_v2", place(block + step % 16 * slot), place(source + step * 7 % 16 * slot), size(slot))
    there = block + step * 37 % (BLOCK_BYTES // PIECE_BYTES - 1) * PIECE_BYTES
    call("cuMemsetD32_v2", place(there), ctypes.c_uint(0x9E3779B9 * (step + 1) & 0xFFFFFFFF), size(PIECE_BYTES // 4))
    call("cuMemsetD8_v2", place(there + PIECE_BYTES), ctypes.c_ubyte(step % 251), size(PIECE_BYTES // 2))
    piece = hashlib.sha256(b"%d" % step).digest() * (PIECE_BYTES // 32)
    call("cuMemcpyHtoD_v2", place(block + step % 16 * 32), piece, size(PIECE_BYTES))


def fill(block: int, first: int, copied_from: int | None = None) -> None:
    """Fills a block: of eight megabytes one is zero, and one is fixed. `first` is the number of the block's first
    megabyte."""
    for offset in range(0, BLOCK_BYTES, MIB):
        number, there, held = first + offset // MIB, place(block + offset), size(min(MIB, BLOCK_BYTES - offset))
        if number % 8 == 5:
            call("cuMemsetD8_v2", there, ctypes.c_ubyte(0), held)
        elif number < UPLOADED_MIB or copied_from is None:
            seed = 0 if number % 8 == 7 else number
            call("cuMemcpyHtoD_v2", there, random.Random(seed).randbytes(held.value), held)
        else:
            start = number * 4099 * 32 % max(1, min(BLOCK_BYTES, UPLOADED_MIB * MIB) - MIB)
            call("cuMemcpyDtoD_v2", there, place(copied_from + start), held)


def digest_of(before: bytes, block: int, into: Any, held: int = BLOCK_BYTES) -> bytes:
    """Returns a digest of `before` and of the whole block. `into` is a host buffer of the block's size."""
    call("cuMemcpyDtoH_v2", into, place(block), size(held))
    made = xxhash.xxh3_128(before)  # several times as fast as the copy, unlike any hash of hashlib
    made.update(into)
    return made.digest()


def serve(reads: int, writes: int) -> None:
    """Runs in a forked child: answers every digest with another one, which depends on all previous ones."""
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
    """Changes its own block on request, and computes its digest."""

    def __init__(self, context: ctypes.c_void_p, memory: apis.Memory, number: int) -> None:
        super().__init__(daemon=True)
        self.context = context
        self.memory = memory
        self.number = number
        self.go = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.digest = b""
        self.step = 0

    def run(self) -> None:
        call("cuCtxSetCurrent", self.context)
        with allocating:
            block = self.memory.allocate(BLOCK_BYTES)
        fill(block, (options.blocks + self.number) * -(-BLOCK_BYTES // MIB))
        into = ctypes.create_string_buffer(BLOCK_BYTES)
        while True:
            self.go.acquire()
            change(block, self.step + self.number, block)
            self.digest = digest_of(self.digest, block, into)
            self.done.release()


class Empty:
    """A block that stays zero except for its first megabyte."""

    def __init__(self, memory: apis.Memory) -> None:
        self.block = memory.allocate(ZERO_BYTES)
        self.into = ctypes.create_string_buffer(ZERO_BYTES)
        call("cuMemsetD8_v2", place(self.block), ctypes.c_ubyte(0), size(ZERO_BYTES))

    def turn(self, step: int, before: bytes) -> bytes:
        there = self.block + step * 37 % (MIB // PIECE_BYTES) * PIECE_BYTES
        call("cuMemcpyHtoD_v2", place(there), random.Random(step).randbytes(PIECE_BYTES), size(PIECE_BYTES))
        return digest_of(before, self.block, self.into, ZERO_BYTES)


class Churn:
    """A block that is allocated in one step, and checked and freed in the next."""

    def __init__(self, memory: apis.Memory) -> None:
        self.memory = memory
        self.block = 0

    def turn(self, step: int) -> None:
        if not self.block:
            self.block = self.memory.allocate(CHURN_BYTES)
            call("cuMemsetD8_v2", place(self.block), ctypes.c_ubyte(step % 251), size(CHURN_BYTES))
            return
        held = ctypes.create_string_buffer(CHURN_BYTES)
        call("cuMemcpyDtoH_v2", held, place(self.block), size(CHURN_BYTES))
        if held.raw != bytes([(step - 1) % 251]) * CHURN_BYTES:
            wrong(f"the block of step {step - 1} holds something else in step {step}")
        self.memory.free(self.block)
        self.block = 0


def memories() -> list[apis.Memory]:
    """The allocators of the blocks, used in turn."""
    if options.mixed:
        return [apis.DriverMemory(), apis.RuntimeMemory(), apis.SegmentMemory(options.device)]
    if options.api == "segments":
        return [apis.SegmentMemory(options.device)]
    return [apis.RuntimeMemory() if options.api == "runtime" else apis.DriverMemory()]


context = ctypes.c_void_p()
if options.mixed or options.shared or options.api != "driver":
    apis.load_runtime()
    call("cudaSetDevice", options.device)
    call("cudaFree", None)
    call("cuCtxGetCurrent", ctypes.byref(context))
else:
    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), options.device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


class Second:
    """A block on another GPU."""

    def __init__(self, number: int) -> None:
        self.context = ctypes.c_void_p()
        other = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(other), number)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), other)
        call("cuCtxSetCurrent", self.context)
        self.block = allocate("cuMemAlloc_v2", BLOCK_BYTES)
        fill(self.block, 3)
        self.into = ctypes.create_string_buffer(BLOCK_BYTES)
        call("cuCtxSetCurrent", context)

    def turn(self, step: int, before: bytes) -> bytes:
        call("cuCtxSetCurrent", self.context)
        change(self.block, step, self.block)
        made = digest_of(before, self.block, self.into)
        call("cuCtxSetCurrent", context)
        return made


sources = memories()
seconds = [Second(options.device + 1)] if options.second_gpu else []
allocating = threading.Lock()
blocks = [sources[number % len(sources)].allocate(BLOCK_BYTES) for number in range(options.blocks)]
for number, block in enumerate(blocks):
    fill(block, number * -(-BLOCK_BYTES // MIB), blocks[0])
if options.idle_mib:
    sources[0].allocate(options.idle_mib * MIB)
empties = [Empty(sources[0])] if options.zero_mib else []
churns = [Churn(memory) for memory in sources] if options.churn else []
into: Any = ctypes.create_string_buffer(BLOCK_BYTES)
pinned = ctypes.c_void_p()
if options.pinned_mib:
    call("cuMemHostAlloc", ctypes.byref(pinned), size(max(options.pinned_mib << 20, BLOCK_BYTES)), 0)
    assert pinned.value is not None
    into = (ctypes.c_char * BLOCK_BYTES).from_address(pinned.value)
if options.managed_mib:
    allocate("cuMemAllocManaged", options.managed_mib << 20, 1)


def export() -> None:
    call("cuIpcGetMemHandle", ctypes.create_string_buffer(64), place(blocks[0]))


if options.export:
    export()
module, spin = ctypes.c_void_p(), ctypes.c_void_p()
if options.busy_ms:
    call("cuModuleLoadData", ctypes.byref(module), SPIN)
    call("cuModuleGetFunction", ctypes.byref(spin), module, b"spin")
busy_ns = ctypes.c_uint64(options.busy_ms * 1_000_000)
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(busy_ns))
children = [fork_child() for _ in range(options.children)]
workers = [Worker(context, sources[number % len(sources)], number) for number in range(options.threads)]
for worker in workers:
    worker.start()

if options.lend:
    Path(options.lend).write_text(exported(blocks[0]))
if options.borrow:
    opened(Path(options.borrow).read_text())
guests = [Guest(apis.RuntimeMemory(), blocks[0], BLOCK_BYTES, options.device) for _ in range(options.shared)]
digest = b""
print(f"READY {options.mib} MiB in {options.blocks} blocks", flush=True)
for step in steps():
    if options.busy_ms:
        call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
        print("busy", step, flush=True)
    for number, block in enumerate(blocks):
        change(block, step + number, blocks[number - 1])
    call("cuCtxSynchronize")
    for churn in churns:
        with allocating:
            churn.turn(step)
    for worker in workers:
        worker.step = step
        worker.go.release()
    for block in blocks:
        digest = digest_of(digest, block, into)
    for second in seconds:
        digest = second.turn(step, digest)
    for empty in empties:
        digest = empty.turn(step, digest)
    for worker in workers:
        worker.done.acquire()
        digest = hashlib.sha256(digest + worker.digest).digest()
    for guest in guests:
        digest = guest.turn(step, digest)
    for ask, answer in children:
        os.write(ask, digest)
        digest = hashlib.sha256(digest + os.read(answer, 32)).digest()
    say(step, digest.hex()[:16])
    if options.export_when and os.path.exists(options.export_when):
        export()
    if options.until and os.path.exists(options.until):
        print("DONE", flush=True)
        break
