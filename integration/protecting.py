"""Runs `migrator protect` beside a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from integration.harness import MIGRATOR, Cluster


@contextlib.contextmanager
def protected(cluster: Cluster, job: str) -> Iterator[Path]:
    """Yields the file with what it says. After the first snapshot it takes the next one in an hour."""
    said = cluster.folder / f"{job}.protect"
    with said.open("w") as out:
        guard = subprocess.Popen(
            [*MIGRATOR, "protect", job, "--every", "3600", "--tries", "20"],
            env=cluster.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield said
    finally:
        guard.kill()
        guard.wait()
