"""Shared by the tests of offloaded device memory: the job, the parts of a move, and moves held at a certain point."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, Asked, Job, until
from snapshotd.runtime.faults import Point

SOURCE, TARGET = "node-1", "spare-1"
UNDONE = 11
MIB = 1 << 20
#: Just enough on the device to be offloaded: every step hashes all of it.
LARGE_MIB = 40
LARGE = ("--mib", str(LARGE_MIB), "--blocks", "4", "--api", "runtime")


def start(lab: GpuCluster, *arguments: str, pace_s: float = 0.05) -> Job:
    return lab.job(SOURCE, *arguments, pace_s=pace_s)


def part(result: dict[str, Any], name: str) -> dict[str, Any]:
    """One part of a move, from the answer of `migrator move --json`."""
    found = [each for each in result["parts"] if each["name"] == name]
    assert len(found) == 1, result["parts"]
    return dict(found[0])


def children(lab: GpuCluster, node: str, module: str) -> list[int]:
    """The children of a node's daemon that run this Python module; all children if `module` is empty."""
    found = []
    for task in Path(f"/proc/{lab.lab.daemon_pid(node)}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if not module or module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        found.append(int(pid))
    return found


@contextlib.contextmanager
def stopped_senders(lab: GpuCluster, job: Job, then: Point) -> Iterator[tuple[list[int], Asked]]:
    """A move that waits at `then` on its source while the block runs, with its memory offloaded.

    No stripe has left the source, because the processes that send them are stopped."""
    lab.cluster.fault(SOURCE, Point.LOCKED, "wait")
    with lab.cluster.begin_move(job, TARGET) as process:
        try:
            until("the driver to be locked", lambda: lab.cluster.fired(SOURCE))
            senders = children(lab, SOURCE, "snapshotd.transport.device.send")
            assert senders
            for pid in senders:
                os.kill(pid, signal.SIGSTOP)
            folder = lab.cluster.run_dir(SOURCE)
            lab.cluster.fault(SOURCE, then, "wait")
            (folder / f"{Point.LOCKED}.go").touch()
            until(f"the move to reach {then}", lambda: lab.cluster.fired(SOURCE))
            asked = Asked()
            yield senders, asked
            (folder / f"{then}.go").touch()
            out, asked.errors = process.communicate(timeout=PATIENCE_S)
            asked.code, asked.answer = process.returncode, json.loads(out)
        finally:
            process.kill()
