"""Whole jobs are suspended to disk and resumed, also if daemons and drivers are killed: one incarnation runs, or none and its
images are whole; and every loss is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from integration.harness import MIGRATOR, PATIENCE_S, WORKLOADS, Cluster, Job, everything_below, until
from integration.job_commands import ONE_OF_A_KIND, WHOLE_JOBS, ask
from integration.torch_jobs import TorchJob, TorchLab, at_rest
from snapshotd.runtime.faults import Point
from tests.sampling import Sampler

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO, SPARE = "node-1", "node-2", "spare-1"


@pytest.fixture
def torch_lab(plain_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(plain_lab) as lab:
        yield lab


def _images(nodes: Cluster) -> list[Path]:
    """All files and folders of suspended ranks."""
    state = nodes.lab.layout.state
    return [path for node in nodes.lab.nodes for path in everything_below(state / node / "suspended")]


def _settled(nodes: Cluster) -> str:
    """Waits until all nodes have carried out what the coordinators have recorded: "running" or "suspended"."""

    def ended() -> list[dict[str, Any]] | None:
        jobs: list[dict[str, Any]] = ask(nodes, "list", "--all")["jobs"]
        return jobs if all(job["ended_unix_s"] for job in jobs) else None

    return "suspended" if any(job["suspended"] for job in until("all records to end", ended)) else "running"


BEFORE_SUSPENDED = [
    *((TWO, point) for point in (Point.BEFORE_BEGIN, Point.BEGIN, Point.BEFORE_FREEZE, Point.STOPPED, Point.FREEZE)),
    *((TWO, point) for point in (Point.BEFORE_DUMP, Point.DUMPING, Point.STREAM)),
    *((ONE, point) for point in (Point.BEFORE_JOB_BEGIN, Point.JOB_BEGIN, Point.DUMPING, Point.BEFORE_JOB_COMMIT)),
]
AFTER_SUSPENDED = [
    (ONE, Point.JOB_COMMIT),
    (TWO, Point.BEFORE_RELEASE),
    (TWO, Point.RELEASE),
    (ONE, Point.BEFORE_RELEASE),
]
BEFORE_RESUMED = [
    *((SPARE, point) for point in (Point.BEFORE_PREPARE, Point.PREPARE, Point.RECEIVING, Point.SEAL)),
    *((SPARE, point) for point in (Point.BEFORE_RESTORE, Point.RESTORING, Point.RESTORED, Point.RESTORE)),
    *((TWO, point) for point in (Point.BEFORE_SEND, Point.SEND)),
    *((ONE, point) for point in (Point.JOB_BEGIN, Point.RESTORE, Point.BEFORE_JOB_COMMIT)),
]
AFTER_RESUMED = [
    *((SPARE, point) for point in (Point.BEFORE_ACTIVATE, Point.ACTIVATED, Point.ACTIVATE)),
    (ONE, Point.JOB_COMMIT),
]


class _Faults:
    """One job, which is suspended and resumed again and again while something fails."""

    def __init__(self, lab: TorchLab, job: TorchJob) -> None:
        self.nodes, self.job = lab.cluster, job

    def strike(self, what: Sequence[str], node: str, point: Point, *, driver_too: bool = False) -> str:
        """Kills a daemon at a point; the state in which the job is then."""
        nodes = self.nodes
        nodes.fault(node, point, "kill")
        with subprocess.Popen(
            [*MIGRATOR, "job", *what, "--lease", "10", "--json"],
            env=nodes.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as asked:
            # The command may end before this process has seen what the daemon did.
            until(f"{point} on {node}", lambda: nodes.lab.daemon_pid(node) is None or asked.poll() is not None)
            assert nodes.lab.daemon_pid(node) is None, f"not killed: {asked.communicate()}\n{nodes.logs()}"
            if driver_too:
                asked.send_signal(signal.SIGKILL)
            nodes.lab.start_daemon(node, timeout_s=PATIENCE_S)
            out, errors = asked.communicate(timeout=PATIENCE_S)
        assert driver_too or json.loads(out)["outcome"] in {"undone", "suspended", "resumed", "unknown"}, errors
        return _settled(nodes)

    def bring_to(self, state: str) -> None:
        """Suspends the job, or resumes it with rank 1 on node-2, if it is not in that state."""
        if _settled(self.nodes) != state:
            ask(self.nodes, *(("suspend", self.job.name) if state == "suspended" else ("resume", self.job.name)))

    def suspended(self) -> None:
        assert self.nodes.processes_of(str(self.job.end)) == [], self.nodes.logs()
        assert len({path.parent for path in _images(self.nodes) if path.is_file()}) == 2

    def running(self) -> None:
        assert len(self.nodes.processes_of(str(self.job.end))) == 2, self.nodes.logs()
        self.job.await_progress(2)
        until("the images to be dropped", lambda: not _images(self.nodes))


def _suspend_and_resume_undisturbed(nodes: Cluster, job: TorchJob) -> None:
    ranks = {row["pid"] for row in nodes.ps(job.agents[0])}
    assert ranks <= set(nodes.processes_of(str(job.end)))
    answer = ask(nodes, "suspend", job.name)
    assert [(rank["rank"], rank["node"]) for rank in answer["ranks"]] == [(0, ONE), (1, TWO)]
    assert ranks & set(nodes.processes_of(str(job.end))) == set(), "the processes of the ranks are gone"
    assert {(row["rank"], row["place"]) for row in nodes.ps(job.agents[0])} == {(0, "suspended"), (1, "suspended")}
    assert ask(nodes, "list")["jobs"][0]["state"] == "suspended"
    assert ask(nodes, "suspend", job.name, expect=23)["error"] == "wrong-state"
    assert nodes.move(job.agents[0], SPARE, expect=23)["error"] == "wrong-state"
    assert all(agent.process.poll() is None for agent in job.agents), "the launchers notice nothing"
    ask(nodes, "resume", job.name, "--on", f"1={SPARE}")
    job.await_progress(3)
    assert job.where() == {0: ONE, 1: SPARE}


@ONE_OF_A_KIND
@pytest.mark.timeout(1800)
def test_ddp_job_is_suspended_and_resumed_elsewhere_also_if_daemons_and_drivers_die(
    torch_lab: TorchLab, sampled: Sampler
) -> None:
    """A fault before COMMIT changes nothing for the job, one after it is finished. In the end every loss that the job has
    printed is that of an undisturbed run."""
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.05", "--until", "{end}", nodes=(ONE, TWO), name="struck")
    job.await_steps(5)
    _suspend_and_resume_undisturbed(nodes, job)
    faults = _Faults(torch_lab, job)
    suspend, resume = ("suspend", job.name), ("resume", job.name, "--on", f"1={SPARE}")
    nodes.move(job.agents[0], TWO, rank=1)  # a job of which a rank has moved is suspended too
    job.await_progress(2)
    for node, point in sampled(BEFORE_SUSPENDED, 1):
        assert faults.strike(suspend, node, point) == "running", f"{point} on {node}\n{nodes.logs()}"
        faults.running()
    for node, point in sampled(AFTER_SUSPENDED, 1):
        faults.bring_to("running")
        assert faults.strike(suspend, node, point) == "suspended", f"{point} on {node}\n{nodes.logs()}"
        faults.suspended()
    for (node, point), driver_too in sampled(product(BEFORE_RESUMED, (False, True)), 1):
        assert faults.strike(resume, node, point, driver_too=driver_too) == "suspended", f"{point}\n{nodes.logs()}"
        faults.suspended()
    for node, point in sampled(AFTER_RESUMED, 1):
        faults.bring_to("suspended")
        assert faults.strike(resume, node, point) == "running", f"{point} on {node}\n{nodes.logs()}"
        faults.running()
    assert job.where() == {0: ONE, 1: SPARE}
    job.end.touch()  # the job makes a new group now: connections to addresses that rank 1 has left
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    assert _settled(nodes) == "running"
    assert _images(nodes) == []


def test_job_of_torchrun_is_suspended_with_its_store_and_resumed_elsewhere(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.torchrun(
        "ddp.py", "--pace-s", "0.05", "--until", "{end}", nodes=(ONE, TWO), name="launched", rendezvous=True
    )
    job.await_steps(5)
    _suspend_and_resume_undisturbed(nodes, job)
    job.end.touch()  # the job makes a new group now, with the store
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    assert _images(nodes) == []


def _give_up_a_job(nodes: Cluster) -> None:
    """Its launcher, which waits on another node than the one with the image, ends as if the rank were killed, as soon as the
    daemon there is back."""
    job = nodes.workload(ONE, "chain.py")
    job.await_lines(3)
    nodes.move(job, SPARE)
    ask(nodes, "suspend", job.name)
    listed = next(one for one in ask(nodes, "list")["jobs"] if one["job"] == job.name)
    assert (listed["state"], listed["rank_count"]) == ("suspended", 1)
    assert listed["image_bytes"] > 0
    nodes.lab.kill_daemon(ONE)
    assert ask(nodes, "drop", job.name, "--yes", expect=12)["error"] == "unreachable", "it may know another such job"
    assert ask(nodes, "drop", listed["record"], "--yes")["waiting_for"] == []
    assert job.process.poll() is None
    nodes.lab.start_daemon(ONE, timeout_s=PATIENCE_S)
    assert job.finish() == -signal.SIGKILL, nodes.logs()
    assert _settled(nodes) == "running"


def _resume_with_a_copy_that_dies_before_it_runs(nodes: Cluster, job: Job) -> None:
    """The resumption is committed. Then it is taken back, and the job can be resumed again from the same image."""
    ask(nodes, "suspend", job.name)
    nodes.fault(TWO, Point.BEFORE_ACTIVATE, "kill")
    command = [*MIGRATOR, "job", "resume", job.name, "--on", f"0={TWO}", "--lease", "10", "--json"]
    with subprocess.Popen(command, env=nodes.environment(), stdout=subprocess.PIPE, text=True) as asked:
        until("the daemon to be killed", lambda: nodes.lab.daemon_pid(TWO) is None or asked.poll() is not None)
        assert nodes.lab.daemon_pid(TWO) is None, nodes.logs()
        held = [pid for pid in nodes.processes_of("chain.py") if f"/{TWO}/" in Path(f"/proc/{pid}/cgroup").read_text()]
        assert len(held) == 1, nodes.logs()
        os.kill(held[0], signal.SIGKILL)
        nodes.lab.start_daemon(TWO, timeout_s=PATIENCE_S)
        out, _ = asked.communicate(timeout=PATIENCE_S)
    assert json.loads(out)["outcome"] == "undone", f"{out}\n{nodes.logs()}"
    assert _settled(nodes) == "suspended", nodes.logs()
    assert job.process.poll() is None, "the launcher notices nothing"
    ask(nodes, "resume", job.name)
    job.await_progress(2)


def test_single_rank_is_suspended_resumed_where_it_was_and_moved(nodes: Cluster) -> None:
    job = nodes.workload(ONE, "chain.py")
    job.await_lines(3)
    ask(nodes, "suspend", job.name)
    lines = job.lines()
    ask(nodes, "resume", job.name)
    job.await_lines(len(lines) + 3)
    _resume_with_a_copy_that_dies_before_it_runs(nodes, job)
    nodes.move(job, SPARE)
    job.await_progress(2)
    ask(nodes, "suspend", job.name)  # its home keeper is on another node now
    ask(nodes, "resume", job.name, "--on", f"0={TWO}")
    job.await_progress(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0, nodes.logs()
    command = [sys.executable, str(WORKLOADS / "chain.py"), "--steps", str(len(job.lines()) - 1), "--pace-s", "0"]
    assert job.text() == subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _give_up_a_job(nodes)
    until("nothing to be left", lambda: not nodes.leftovers() and not _images(nodes))
