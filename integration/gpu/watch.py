"""Observes from outside what the driver and a move do to a process, so that tests can kill a process in the middle of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.drill import node_of
from integration.gpu.gpu_jobs import PATIENCE_S
from integration.harness import Cluster, until


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def holds_gpu(pid: int) -> bool:
    """Whether a process has a descriptor of the driver; it has none between checkpoint and restore."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith("/dev/nvidia"):
                    return True
    return False


def cuda_helpers(node: str) -> list[int]:
    """The processes in which a node's daemon calls the driver."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(b"snapshotd.cuda.helper" in word for word in words) and node_of(int(folder.name)) == node:
                found.append(int(folder.name))
    return found


def await_while(asked: subprocess.Popen[str], what: str, condition: Callable[[], Any], cluster: Cluster) -> Any:
    """Waits for a condition during a move; fails if the move ends first."""

    def seen() -> Any:
        value = condition()
        if not value and asked.poll() is not None:
            out, errors = asked.communicate()
            raise AssertionError(f"the move ended, and {what} was not seen\n{out}{errors}\n{cluster.logs()}")
        return value

    return until(what, seen, PATIENCE_S)


def answer(asked: subprocess.Popen[str], cluster: Cluster, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """The answer of a move in the background, once it has ended."""
    try:
        out, errors = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        raise AssertionError(f"the move takes over {timeout_s:.0f} s\n{cluster.logs()}") from None
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        raise AssertionError(f"exit {asked.returncode}\n{out}{errors}\n{cluster.logs()}") from None
    return result
