"""Samples how much host memory a move uses on each node, without the memory of the rank itself.

Counted for a node are the files in its image folder (images, stripes and rings), which its processes map, and the growth of
the anonymous memory of its daemon and the daemon's children. A rank's own memory is not counted: it is not used by the move,
except for the pinned staging buffers, whose size is constant.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.drill import node_of
from integration.harness import Cluster

_EVERY_S = 0.05


class Peaks:
    """The largest sample, by node."""

    def __init__(self, nodes: Cluster) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(nodes.lab.nodes, 0)
        self._folders = {node: nodes.run_dir(node) / "images" for node in nodes.lab.nodes}
        self._before = {node: self._anonymous(node) for node in nodes.lab.nodes}

    def look(self) -> None:
        for node, folder in self._folders.items():
            grown = max(0, self._anonymous(node) - self._before[node])
            self.bytes[node] = max(self.bytes[node], _stored_bytes(folder) + grown)

    @staticmethod
    def _anonymous(node: str) -> int:
        return sum(_anonymous_bytes(pid) for pid in _of_the_daemon(node))


@contextmanager
def peaks(nodes: Cluster) -> Iterator[Peaks]:
    """Samples until the block ends."""
    found, over = Peaks(nodes), threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY_S):
            found.look()

    thread = threading.Thread(target=sample, name="host memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _of_the_daemon(node: str) -> list[int]:
    """The pids of a node's daemon and its helper processes; not of ranks, keepers or criu."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(b"snapshotd.") or word == b"snapshotd" for word in words):
                pid = int(folder.name)
                if node_of(pid) == node:
                    found.append(pid)
    return found


def _anonymous_bytes(pid: int) -> int:
    """0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def _stored_bytes(folder: Path) -> int:
    """The space used by the files below a folder. Files may appear and disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(Path(place) / name, follow_symlinks=False).st_blocks * 512
    return total


def available_bytes() -> int:
    """What this machine can give to processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
