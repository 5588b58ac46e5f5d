"""`migrator job …` for tests of whole jobs, and what it answers."""

from __future__ import annotations

import json
from typing import Any

from integration.harness import PATIENCE_S, Cluster


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
