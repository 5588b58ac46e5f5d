"""Eight forked workers that share most of their memory with their parent.

After the fork they write some pages, drop some and protect some; one has a child of its own, and another child executes
another program. The parent rewrites and drops pages that its workers keep, and has some that they do not have. Each process
answers with the digest of its memory.
"""

import argparse
import ctypes
import mmap
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable

from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=128)
parser.add_argument("--own-mib", type=int, default=24)
options, _ = parser.parse_known_args()

Ask = Callable[..., str]
PAGE, MIB = 4096, 1 << 20
WORKERS = 8
libc = ctypes.CDLL(None, use_errno=True)
memory = mmap.mmap(-1, options.mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for number in range(options.mib):
    memory[number * MIB : (number + 1) * MIB] = random.Random(number).randbytes(MIB)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


def digest(whole: bool = False) -> str:
    """Of all of the memory, or of some of its pages."""
    found = 0
    for page in range(0, len(memory) // PAGE, 256 if whole else 97):
        found = zlib.crc32(memory[page * PAGE : (page + (256 if whole else 1)) * PAGE], found)
    return f"{found:08x}"


def write(first: int, count: int, value: int) -> None:
    for page in range(first, first + count, 3):
        memory[page * PAGE : page * PAGE + 16] = value.to_bytes(16, "little")


def drop(first: int, count: int) -> None:
    if libc.madvise(ctypes.c_void_p(address + first * PAGE), ctypes.c_size_t(count * PAGE), 4):  # MADV_DONTNEED
        wrong("madvise")


def protect(first: int, count: int) -> None:
    if libc.mprotect(ctypes.c_void_p(address + first * PAGE), ctypes.c_size_t(count * PAGE), mmap.PROT_READ):
        wrong("mprotect")


def start(change: Callable[[], list[Ask]]) -> Ask:
    """Forks a worker that changes its memory and then answers with its digest, and those of the workers that `change` has
    started; returns a function that asks it."""
    ask_read, ask_write = os.pipe()
    answer_read, answer_write = os.pipe()
    if os.fork() == 0:
        os.close(ask_write)
        os.close(answer_read)
        below = change()
        os.write(answer_write, b"!")
        while question := os.read(ask_read, 1):
            whole = question == b"!"
            answer = ".".join((digest(whole), *(ask(whole) for ask in below)))
            os.write(answer_write, answer.ljust(99).encode())
        os._exit(0)
    os.close(ask_read)
    os.close(answer_write)
    if os.read(answer_read, 1) != b"!":
        wrong("a worker")

    def ask(whole: bool = False) -> str:
        os.write(ask_write, b"!" if whole else b"?")
        return os.read(answer_read, 99).decode().strip()

    return ask


def change_again() -> list[Ask]:
    write(9000, 300, 99)
    write(100, 60, 98)
    return []


def change(number: int) -> list[Ask]:
    write(number * 64, 256, number + 1)
    if number == 1:
        drop(5000, 512)
    if number == 2:
        return [start(change_again)]
    if number == 3:
        protect(8192, 1024)
    return []


asks = [start(lambda number=number: change(number)) for number in range(WORKERS)]  # type: ignore[misc]
program = (
    "import sys; noise = bytes(range(256)) * 4096\nfor line in sys.stdin: print(hash(noise) and len(noise), flush=True)"
)
other = subprocess.Popen(
    [sys.executable, "-c", program, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
write(20000, 120, 77)  # the workers still have what was there
drop(21000, 60)
own = bytearray(random.Random(WORKERS).randbytes(options.own_mib * MIB))
assert other.stdin is not None
assert other.stdout is not None
first = [zlib.crc32(own), digest(True), *(ask(True) for ask in asks)]
for step in steps(default_pace_s=0.05):
    other.stdin.write("?\n")
    other.stdin.flush()
    say(step, other.stdout.readline().strip(), asks[step % WORKERS]())
now = [zlib.crc32(own), digest(True), *(ask(True) for ask in asks)]
if now != first:
    wrong(f"memory: {first} became {now}")
