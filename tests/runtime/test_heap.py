from __future__ import annotations

import subprocess
import sys

#: Many small blocks, every hundredth of which stays: they keep the heap from shrinking by itself at its end.
PROGRAM = """
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
heap.give_back()
print(freed - held_kib())
"""


def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30_000
