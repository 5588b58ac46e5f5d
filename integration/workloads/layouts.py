"""Large memory of every kind: with holes and zero pages, read-only, without access, executable, locked, in huge pages,
shared with a child, of a file, in regions that come and go, and such as children do not get, or get empty.

Each step changes some pages, and prints the digest of one region. In each step a child begins, looks and ends.
"""

import ctypes
import mmap
import os
import random
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from steps import say, steps, wrong

PAGE, MIB = 4096, 1 << 20
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
MADV_WIPEONFORK = 18
libc = ctypes.CDLL(None, use_errno=True)


def region(mib: int, seed: int, rights: int = READ | WRITE) -> mmap.mmap:
    made = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=rights)
    for number in range(mib):
        made[number * MIB : (number + 1) * MIB] = random.Random(seed * 1000 + number).randbytes(MIB)
    return made


def address_of(made: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(made))


def protect(made: mmap.mmap, first: int, pages: int, rights: int) -> None:
    address = address_of(made) + first * PAGE
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
libc.mlock(ctypes.c_void_p(address_of(locked)), ctypes.c_size_t(2 * MIB))
own = region(4, 7)
own.madvise(mmap.MADV_DONTFORK)
wiped = region(4, 8)
wiped.madvise(MADV_WIPEONFORK)
shared = mmap.mmap(-1, 4 * MIB)
shared[:] = random.Random(9).randbytes(4 * MIB)
with open(sys.executable, "rb") as program:
    of_file = mmap.mmap(program.fileno(), 0, access=mmap.ACCESS_COPY)
heap = [random.Random(number).randbytes(100_000) for number in range(100)]
coming = deque([region(1, 10)], maxlen=5)
regions = (holes, constant, code, huge, locked, own, wiped, shared, of_file)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # the shim's control thread needs one


def in_child(right: Callable[[], bool]) -> None:
    pid = os.fork()
    if not pid:
        os._exit(0 if right() else 3)
    if os.waitpid(pid, 0)[1]:
        wrong("in a child")


def seen_by_a_child() -> bool:
    shared[at : at + 8] = (step + 1).to_bytes(8, "little")
    mapped = Path("/proc/self/maps").read_text()
    return f"{address_of(own):x}-" not in mapped and not any(wiped[:PAGE]) and not any(wiped[-PAGE:])


for step in steps():
    for one in (holes, code, huge, locked, own, wiped, of_file):
        at = (step * 7919 % (len(one) // PAGE)) * PAGE
        one[at : at + 8] = (step + 1).to_bytes(8, "little")
    coming.append(region(1, step))
    at = (step * 7919 % (len(shared) // PAGE)) * PAGE
    in_child(seen_by_a_child)
    heap[step % len(heap)] = heap[step % len(heap)][1:] + b"!"
    number = step % (len(regions) + 3)
    if number < len(regions):
        said = zlib.crc32(regions[number])
    elif number == len(regions):
        said = zlib.crc32(b"".join(heap))
    elif number == len(regions) + 1:
        said = zlib.crc32(b"".join(one[:] for one in coming))
    else:
        protect(hidden, 0, 1024, READ)
        said = zlib.crc32(hidden)
        protect(hidden, 0, 1024, 0)
    say(step, f"{number} {said:08x}")
