from __future__ import annotations

import subprocess
import sys

#: Many small blocks, every hundredth of which stays: they keep the heap from shrinking by itself at its end.
FREED = """
import asyncio
from pathlib import Path
from snapshotd.runtime import heap
def held_kib():
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1])
heap.share()
blocks = [bytearray(4000) for _ in range(20_000)]
kept = blocks[::100]
del blocks
freed = held_kib()
asyncio.run(heap.give_back())
print(freed - held_kib())
"""


def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30_000


#: An object that refers to itself and has grown old, so Python's own collector leaves it.
UNUSED = """
import asyncio, weakref
from snapshotd.runtime import heap
class Node:
    pass
others = [Node() for _ in range(200_000)]
heap.keep()
unused = Node()
unused.itself, seen = unused, weakref.ref(unused)
for _ in range(3):
    unused.others = [Node() for _ in range(2_000)]  # it grows old
del unused
before = seen() is not None
asyncio.run(heap.give_back())
print(before, seen() is None)
"""


def test_unused_objects_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
