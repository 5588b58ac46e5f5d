"""Jobs as users start them, without a name and with launchers: each has its name, and each worker can be moved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration.harness import MIGRATOR, WORKLOADS, Cluster, Job, until

PROGRAMS = Path(__file__).parent / "programs"


def started(nodes: Cluster, node: str, name: str, command: list[str], **environment: str) -> Job:
    """`migrator run -- COMMAND`, without any option."""
    out = nodes.folder / f"{name}.out"
    with out.open("wb") as file:
        process = nodes.lab.spawn(
            node,
            ["env", *(f"{key}={value}" for key, value in environment.items()), *MIGRATOR, "run", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    job = Job(nodes.lab, process, out, name)
    nodes.jobs.append(job)
    return job


def ranks(nodes: Cluster, job: str) -> list[dict[str, Any]]:
    done = nodes.migrator("ps", "--json")
    assert done.returncode == 0, done.stderr
    return [rank for rank in json.loads(done.stdout)["ranks"] if rank["job"].startswith(job)]


def test_jobs_of_the_same_script_on_two_nodes_have_different_names(nodes: Cluster) -> None:
    script = nodes.folder / "unnamed.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(3600)\n")
    for node in ("node-1", "node-2"):
        started(nodes, node, f"unnamed-{node}", [sys.executable, str(script)]).await_lines(1)
    found = {rank["job"]: rank["node"] for rank in ranks(nodes, "unnamed")}
    assert found == {"unnamed": "node-1", "unnamed-2": "node-2"}


def test_workers_of_deepspeed_move_one_by_one(nodes: Cluster) -> None:
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    script = [str(WORKLOADS / "threads.py"), "--end-file", str(end)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", *script]
    job = started(nodes, "node-1", "deepspeed", launcher, PYTHONPATH=str(PROGRAMS))
    until("both ranks", lambda: [rank["rank"] for rank in ranks(nodes, "threads")] == [0, 1])
    job.await_lines(4)
    (uid,) = (rank["uid"] for rank in ranks(nodes, "threads") if rank["rank"] == 1)
    done = nodes.migrator("move", "--rank", uid, "--to", "spare-1")
    assert done.returncode == 0, done.stderr
    job.await_progress()
    places = {rank["rank"]: rank["node"] for rank in ranks(nodes, "threads")}
    assert places == {0: "node-1", 1: "spare-1"}
    job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.text().count("DONE") == 2  # not always in a line of its own: each word is a write, of two processes
    assert "warning" not in job.text()
