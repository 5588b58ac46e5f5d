"""Large memory of every kind: with holes and zero pages, read-only, without access, executable, locked, in huge pages.

Each step changes some pages, and prints the digest of one region.
"""

import ctypes
import mmap
import random
import zlib

from steps import say, steps, wrong

PAGE, MIB = 4096, 1 << 20
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
libc = ctypes.CDLL(None, use_errno=True)


def region(mib: int, seed: int, rights: int = READ | WRITE) -> mmap.mmap:
    made = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=rights)
    for number in range(mib):
        made[number * MIB : (number + 1) * MIB] = random.Random(seed * 1000 + number).randbytes(MIB)
    return made


def protect(made: mmap.mmap, first: int, pages: int, rights: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(made)) + first * PAGE
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), rights):
        wrong("mprotect")


holes = region(24, 1)
for page in range(500, 6000, 700):
    holes.madvise(mmap.MADV_DONTNEED, page * PAGE, 90 * PAGE)
for page in range(3000, 3100):
    holes[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
constant = region(8, 2)
protect(constant, 0, 2048, READ)
hidden = region(4, 3)
protect(hidden, 0, 1024, 0)
code = region(20, 4, READ | WRITE | EXECUTE)
huge = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
huge.madvise(mmap.MADV_HUGEPAGE)
huge[:] = random.Random(5).randbytes(16 * MIB)
locked = region(2, 6)
libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(locked))), ctypes.c_size_t(2 * MIB))
heap = [random.Random(number).randbytes(100_000) for number in range(100)]
regions = (holes, constant, code, huge, locked)

for step in steps():
    for one in (holes, code, huge, locked):
        at = (step * 7919 % (len(one) // PAGE)) * PAGE
        one[at : at + 8] = (step + 1).to_bytes(8, "little")
    heap[step % len(heap)] = heap[step % len(heap)][1:] + b"!"
    number = step % (len(regions) + 2)
    if number < len(regions):
        said = zlib.crc32(regions[number])
    elif number == len(regions):
        said = zlib.crc32(b"".join(heap))
    else:
        protect(hidden, 0, 1024, READ)
        said = zlib.crc32(hidden)
        protect(hidden, 0, 1024, 0)
    say(step, f"{number} {said:08x}")
