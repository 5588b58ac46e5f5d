"""Holds a given number of MiB of incompressible memory while it does steps, and checks it by digest at the end."""

import argparse
import hashlib
import mmap
import os

from steps import say, steps, wrong

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=256)
parser.add_argument("--zero-mib", type=int, default=0, help="touched, but all zero")
parser.add_argument("--ghost-mib", type=int, default=0, help="in an unlinked file on /dev/shm")
options, _ = parser.parse_known_args()


def fill(view: mmap.mmap, mib: int) -> None:
    noise = os.urandom(1 << 20)
    for number in range(mib):
        block = bytearray(noise)
        for page in range(256):
            block[page * 4096 : page * 4096 + 8] = (number * 256 + page).to_bytes(8, "little")
        view[number << 20 : (number + 1) << 20] = bytes(block)


def digest(view: mmap.mmap) -> str:
    return hashlib.blake2b(view).hexdigest()


views = []
if options.mib:
    views.append(mmap.mmap(-1, options.mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    fill(views[-1], options.mib)
if options.zero_mib:
    views.append(mmap.mmap(-1, options.zero_mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for offset in range(0, options.zero_mib << 20, 4096):
        views[-1][offset] = 0
if options.ghost_mib:
    path = f"/dev/shm/ghost-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.unlink(path)
    os.ftruncate(fd, options.ghost_mib << 20)
    views.append(mmap.mmap(fd, options.ghost_mib << 20))
    fill(views[-1], options.ghost_mib)
before = [digest(view) for view in views]
print("READY", flush=True)
for step in steps():
    say(step)
if [digest(view) for view in views] != before:
    wrong("memory")
print("SAME", flush=True)
