"""The autopilot in a lab: a node reports trouble, its rank moves by itself, and no step of the job is lost or done twice.

The alarms are raised by the node's daemon, which reads a line of the kernel's log. In a lab that log is a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from integration.behaviour import end_chain
from integration.harness import MIGRATOR, NODES, PATIENCE_S, Cluster, Job, cluster, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

POLICY = """
[[rules]]
name = "failing"
checks = ["host-mce"]
action = "move"

[breaker]
nodes_percent = 80
rank_window_s = 1
back_off_s = 1
"""


class Pilot:
    """A lab with a job, and an autopilot with a state of its own for each test."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.policy = nodes.folder / "policy.toml"
        self.policy.write_text(POLICY)
        self.state = nodes.folder / "state"
        self.witness = nodes.folder / "witness"
        self.process: subprocess.Popen[bytes] | None = None

    def job(self) -> Job:
        self.witness.unlink(missing_ok=True)
        job = self.nodes.workload("node-1", "chain.py", "--witness", str(self.witness))
        job.await_lines(5)
        return job

    def memory_fails(self, node: str) -> None:
        """Writes what a kernel reports into the file that is the kernel's log for the daemon of this node."""
        path = self.nodes.lab.layout.node(node) / "health/dev/kmsg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"4,{time.time_ns()},{int(time.monotonic() * 1e6)},-;Memory failure: 0x1f0: recovery failed\n")

    def start(self) -> None:
        """Starts the autopilot and waits until it has seen every node."""
        command = [*MIGRATOR, "autopilot", "--policy", str(self.policy), "--state", str(self.state)]
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


@pytest.fixture(scope="module")
def lab() -> Iterator[Pilot]:
    with cluster("pilot") as made:
        yield Pilot(made)


@pytest.fixture
def pilot(lab: Pilot) -> Iterator[Pilot]:
    yield lab
    lab.reset()


def test_rank_leaves_a_failing_node_by_itself_and_returns_after_the_repair(pilot: Pilot) -> None:
    job = pilot.job()
    pid = pilot.nodes.lab.start_autopilot(pilot.policy)  # as `migrator lab up --autopilot` does
    pilot.state = pilot.nodes.lab.cluster_path.parent / "autopilot"
    pilot.sees_all()
    pilot.memory_fails("node-1")
    until("the rank to move", lambda: pilot.results() == ["moved"])
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("signal", "state", "intent", "result")[:4] == ["signal", "state", "intent", "result"]
    (one,) = pilot.verb("report")["interruptions"]
    assert (one["outcome"], one["cause_class"], one["target"]) == ("moved", "hardware", "spare-1")
    assert one["pause_s"] > 0

    answer = pilot.verb("return", "node-1")  # carried out by the autopilot
    assert (answer["state"], answer["summary"]) == ("returned", "1 rank moved")
    assert pilot.place(job) == ["node-1"]
    os.kill(pid, signal.SIGTERM)
    until("the autopilot to stop", lambda: pilot.events("stop"))
    pilot.finish(job)


def test_autopilot_killed_between_intent_and_move_does_nothing_twice(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    # The first step of a move waits: the intent is recorded, and nothing was done yet.
    pilot.nodes.fault("spare-1", "before-prepare", "wait")
    pilot.memory_fails("node-1")
    until("the first step", lambda: pilot.nodes.fired("spare-1"))
    pilot.kill()
    assert pilot.results() == ["intended"]
    (pilot.nodes.run_dir("spare-1") / "before-prepare.go").touch()
    assert pilot.place(job) == ["node-1"]

    pilot.start()
    until("the rank to move", lambda: pilot.results()[1:] == ["moved"])
    # Whether the target has journalled the first step depends on when it noticed that its caller is gone.
    assert pilot.results()[0] in ("never began", "undone")
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("intent", "result") == ["intent", "result"] * 2
    pilot.finish(job)


def test_autopilot_killed_during_a_move_finds_out_how_it_ended(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    pilot.nodes.fault("spare-1", "before-activate", "wait")
    pilot.memory_fails("node-1")
    until("the commit", lambda: pilot.nodes.fired("spare-1"))
    pilot.kill()
    (pilot.nodes.run_dir("spare-1") / "before-activate.go").touch()

    pilot.start()
    until("the result", lambda: pilot.results() == ["moved"])
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("intent", "result") == ["intent", "result"]
    pilot.finish(job)


def test_without_a_spare_it_alerts_and_waits(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    pilot.verb("taint", "spare-1")
    pilot.memory_fails("node-1")
    query = "SELECT text FROM alerts WHERE text LIKE '%no node can take it%'"
    until("the alert", lambda: pilot.rows(query))
    assert pilot.results() == []
    job.await_progress()
    pilot.verb("untaint", "spare-1")
    until("the rank to move", lambda: pilot.results() == ["moved"])
    pilot.finish(job)
