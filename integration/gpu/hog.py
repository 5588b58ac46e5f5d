"""Controls `gpu_hog.py`, another process that fills the GPU's memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from integration.gpu.gpu_jobs import GIB
from integration.harness import WORKLOADS, Cluster, until


class Hog:
    """Another process on the GPU, which allocates its free memory on request."""

    def __init__(self, nodes: Cluster, leave_mib: int) -> None:
        stem = nodes.folder / f"hog-{time.monotonic_ns()}"
        self.go, self.release, self.out = (stem.with_suffix(f".{end}") for end in ("go", "release", "out"))
        command = [sys.executable, str(WORKLOADS / "gpu_hog.py"), str(self.go), str(self.release), str(leave_mib)]
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._await("WAITING")

    def take(self) -> float:
        """Allocates the free memory; returns how many GiB it got."""
        self.go.touch()
        self._await("TAKEN")
        return round(int(self.out.read_text().split("TAKEN ")[1].split()[0]) / GIB, 1)

    def let_go(self) -> None:
        self.release.touch()
        self.process.wait(60)

    def _await(self, word: str) -> None:
        def printed() -> bool:
            text = self.out.read_text()
            assert self.process.poll() is None or word in text, text
            return word in text

        until(f"{word} of the hog", printed, 60)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for path in (self.go, self.release, self.out):
            path.unlink(missing_ok=True)


@contextmanager
def hog(nodes: Cluster, leave_mib: int) -> Iterator[Hog]:
    """Starts the process, which has no memory allocated yet."""
    made = Hog(nodes, leave_mib)
    try:
        yield made
    finally:
        made.end()
