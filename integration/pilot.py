"""An autopilot beside a lab: starts and kills it, raises alarms on nodes, and reads its record."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
from typing import Any

from integration.behaviour import end_chain
from integration.harness import MIGRATOR, NODES, PATIENCE_S, Cluster, Job, until
from integration.kernel_log import kernel_says


class Pilot:
    """A lab with a job, and an autopilot with a state of its own for each test."""

    def __init__(self, nodes: Cluster, policy: str, *options: str, state: str = "state") -> None:
        self.nodes, self.options = nodes, options
        self.policy = nodes.folder / "policy.toml"
        self.policy.write_text(policy)
        self.state = nodes.folder / state
        self.witness = nodes.folder / "witness"
        self.process: subprocess.Popen[bytes] | None = None

    def job(self) -> Job:
        self.witness.unlink(missing_ok=True)
        job = self.nodes.workload("node-1", "chain.py", "--witness", str(self.witness))
        job.await_lines(5)
        return job

    def memory_fails(self, node: str) -> None:
        self.kernel_says(node, "Memory failure: 0x1f0: recovery failed")

    def kernel_says(self, node: str, text: str) -> None:
        kernel_says(self.nodes.lab, node, text)

    def start(self) -> None:
        """Starts the autopilot and waits until it has seen every node."""
        command = [*MIGRATOR, "autopilot", "--policy", str(self.policy), "--state", str(self.state), *self.options]
        with (self.nodes.folder / "autopilot.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self.nodes.environment(), stdout=log, stderr=log)
        self.sees_all()

    def sees_all(self) -> None:
        until("the autopilot to see all nodes", lambda: len(self.rows("SELECT * FROM cursors")) == len(NODES))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of the autopilot's database, read beside it."""
        with contextlib.suppress(sqlite3.OperationalError):
            connection = sqlite3.connect(f"file:{self.state}/autopilot.sqlite?mode=ro", uri=True)
            try:
                return connection.execute(query).fetchall()
            finally:
                connection.close()
        return []

    def events(self, *kinds: str) -> list[str]:
        return [kind for (kind,) in self.rows("SELECT kind FROM events ORDER BY id") if kind in kinds]

    def results(self) -> list[str]:
        return [state for (state,) in self.rows("SELECT state FROM moves ORDER BY rowid")]

    def suspensions(self) -> list[tuple[str, str]]:
        """The jobs that it has suspended, or tried to, and what has become of that."""
        query = "SELECT json_extract(data, '$.job'), json_extract(data, '$.state') FROM suspensions ORDER BY rowid"
        return [(job, state) for job, state in self.rows(query)]

    def verb(self, *arguments: str) -> dict[str, Any]:
        done = self.nodes.migrator(*arguments, "--state", str(self.state), "--json")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.nodes.logs()}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def place(self, job: Job) -> list[str]:
        return [str(rank["node"]) for rank in self.nodes.ps(job)]

    def finish(self, job: Job) -> None:
        """The job ends with the output of an undisturbed run, no step ran twice, and the record is complete."""
        end_chain(job)
        steps = [int(line) for line in self.witness.read_text().split()]
        assert steps == list(range(len(steps)))
        assert self.verb("report", "verify")["valid"]

    def reset(self) -> None:
        self.kill()
        self.nodes.tidy()
        shutil.rmtree(self.state, ignore_errors=True)
        done = self.nodes.migrator("health", "--clear", "all", *self.nodes.lab.nodes)
        assert done.returncode == 0, done.stderr
