"""`migrator job …` for tests of whole jobs, and what it answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from integration.harness import MIGRATOR, PATIENCE_S, Asked, Cluster, until

#: Each of these tests takes minutes, and all of them took half of the suite's time.
WHOLE_JOBS = pytest.mark.sampled(4, group="whole jobs")
#: On a test of such a file: it is the one of its kind, and runs every other day on average.
ONE_OF_A_KIND = pytest.mark.sampled(2, group="whole jobs, each of a kind")


def ask(nodes: Cluster, *arguments: str, expect: int = 0) -> dict[str, Any]:
    """The answer of `migrator job ARGUMENTS --json`; fails unless it exits with `expect`."""
    done = nodes.migrator("job", *arguments, "--json", timeout_s=2 * PATIENCE_S)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{nodes.logs()}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def snapshots(nodes: Cluster, job: str) -> list[dict[str, Any]]:
    """The snapshots of a job that count."""
    listed = ask(nodes, "list", "--all")["jobs"]
    return [one for one in listed if (one["job"], one["kind"], one["state"]) == (job, "snapshot", "snapshot")]


@contextlib.contextmanager
def reaching(nodes: Cluster, node: str, point: str, action: str, *arguments: str) -> Iterator[Asked]:
    """Runs `migrator ARGUMENTS --json`, and the block when a node's daemon has reached a fault point. If the daemon waits
    there it goes on after the block. The answer is complete after it."""
    nodes.fault(node, point, action)
    asked = Asked()
    with subprocess.Popen(
        [*MIGRATOR, *arguments, "--json"],
        env=nodes.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until(f"{point} on {node}", lambda: nodes.fired(node) or process.poll() is not None)
            assert process.poll() is None, f"it ended before {point}: {process.communicate()}\n{nodes.logs()}"
            yield asked
            if action == "wait":
                (nodes.run_dir(node) / f"{point}.go").touch()
            out, asked.errors = process.communicate(timeout=PATIENCE_S)
            asked.code, asked.answer = process.returncode, json.loads(out)
        finally:
            process.kill()
