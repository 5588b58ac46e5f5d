"""Holds incompressible memory, writes a part of it all the time, and checks all of it, page by page, in the end.

What each page must contain follows from the number of the last step that wrote it. A second thread only waits: the shim's
control thread needs a process with threads. With --children there is a child that ends and one that begins every few steps.
"""

import argparse
import array
import hashlib
import mmap
import os
import threading

from steps import say, steps, wrong

PAGE = 4096

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=256)
parser.add_argument("--pages-per-step", type=int, default=64)
parser.add_argument("--children", action="store_true")
parser.add_argument("--huge", action="store_true", help="use transparent huge pages where the kernel has them")
parser.add_argument("--work", type=int, default=0, help="digests of 1 MiB in each step: what the job computes")
options, _ = parser.parse_known_args()

count = options.mib * 256
noise = os.urandom(1 << 20)
written = array.array("I", bytes(4 * count))  # the step that wrote each page last
memory = mmap.mmap(-1, count * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if options.huge:
    memory.madvise(mmap.MADV_HUGEPAGE)


def content(page: int, step: int) -> bytes:
    """Different for every page and step, and quick to make."""
    at = (page * 64 + step * 4096) % (len(noise) - PAGE)
    stamp = page.to_bytes(8, "little") + step.to_bytes(8, "little")
    return stamp + noise[at + 16 : at + PAGE - 16] + stamp


def write(page: int, step: int) -> None:
    memory[page * PAGE : (page + 1) * PAGE] = content(page, step)
    written[page] = step


def child() -> int:
    pid = os.fork()
    if pid:
        return pid
    mine = bytearray(os.urandom(1 << 21))
    before = hashlib.blake2b(mine).digest()
    while True:
        mine[:] = mine[::-1]
        mine[:] = mine[::-1]
        if hashlib.blake2b(mine).digest() != before:
            os._exit(3)
        threading.Event().wait(0.05)


for number in range(count):
    write(number, 0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
children: list[int] = []
position = 1
print("READY", flush=True)
for step in steps():
    for _write in range(options.pages_per_step):
        position = (position * 1103515245 + 12345) % (1 << 31)
        write(position % count, step + 1)
    for _digest in range(options.work):
        hashlib.blake2b(noise)
    if options.children and step % 10 == 0:
        children.append(child())
        if len(children) > 2:
            oldest = children.pop(0)
            os.kill(oldest, 9)
            if os.waitpid(oldest, 0)[1] != 9:
                wrong("a child")
    say(step)
for pid in children:
    os.kill(pid, 9)
    if os.waitpid(pid, 0)[1] != 9:
        wrong("a child")
changed = [page for page in range(count) if memory[page * PAGE : (page + 1) * PAGE] != content(page, written[page])]
if changed:
    wrong(f"{len(changed)} pages, first {changed[0]} of step {written[changed[0]]}")
print("SAME", flush=True)
