"""Uses unlinked files on /dev/shm and /tmp: small and read by descriptor, large and mapped, sparse."""

import argparse
import hashlib
import mmap
import os
import random
import tempfile

from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--large-mib", type=int, default=32)
options, _ = parser.parse_known_args()


def unlinked(folder: str, size: int) -> int:
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    os.ftruncate(fd, size)
    return fd


small = unlinked("/tmp", 0)
os.write(small, b"small ghost")
large_bytes = options.large_mib << 20
large = unlinked("/dev/shm", large_bytes)
view = mmap.mmap(large, large_bytes)
noise = random.Random(1).randbytes(1 << 20)
for offset in range(0, large_bytes, 1 << 20):
    view[offset : offset + (1 << 20)] = noise
sparse = unlinked("/dev/shm", 1 << 30)
os.pwrite(sparse, b"far away", (1 << 30) - 4096)
digest = hashlib.blake2b(view).hexdigest()
for step in steps():
    if os.pread(small, 100, 0)[:11] != b"small ghost":
        wrong("small ghost")
    os.pwrite(small, str(step).encode(), 11)
    if os.pread(sparse, 8, (1 << 30) - 4096) != b"far away" or os.fstat(sparse).st_blocks > 64:
        wrong(f"sparse ghost: {os.fstat(sparse).st_blocks} blocks")
    position = (step * 4099) % large_bytes
    view[position] = (view[position] + 1) % 256
    say(step, view[position], os.pread(small, 100, 11).decode())
    view[position] = (view[position] - 1) % 256
if hashlib.blake2b(view).hexdigest() != digest:
    wrong("large ghost")
