"""Whole jobs are snapshotted while they run, and rolled back to their last snapshot after a rank's node was lost: every loss
that the job prints is that of an undisturbed run, and it prints each once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.harness import MIGRATOR, Cluster, until
from integration.job_commands import ONE_OF_A_KIND, WHOLE_JOBS, ask, snapshots
from integration.protecting import protected
from integration.torch_jobs import TorchJob, TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO, SPARE = "node-1", "node-2", "spare-1"


@pytest.fixture
def torch_lab(plain_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(plain_lab) as lab:
        yield lab


@ONE_OF_A_KIND
@pytest.mark.timeout(900)
def test_ddp_job_is_rolled_back_onto_another_node_after_its_node_was_lost(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.05", "--until", "{end}", nodes=(ONE, TWO), name="rolled")
    job.await_steps(5)

    first = ask(nodes, "snapshot", job.name)
    assert [(rank["rank"], rank["node"], rank["copy"]) for rank in first["ranks"]] == [(0, ONE, TWO), (1, TWO, ONE)]
    job.await_progress(3)
    with configured(nodes, [ONE], {"job_snapshots": False}):
        refused = ask(nodes, "snapshot", job.name, expect=11)
        assert (refused["error"], refused["pause_s"]) == ("refused", 0)
        assert f"switched off on {ONE}" in refused["reason"]
        ask(nodes, "rollback", job.name)  # of a job that is well: its processes end, and it goes on from the images
    assert len(nodes.processes_of(str(job.end))) == 2
    job.await_progress(3)
    assert all(agent.process.poll() is None for agent in job.agents), "the launchers notice nothing"

    nodes.move(job.agents[0], SPARE, rank=1)
    second = ask(nodes, "snapshot", job.name)
    until(
        "the second snapshot to replace the first",
        lambda: [one["record"] for one in snapshots(nodes, job.name)] == [second["record"]],
    )
    job.await_progress(3)
    nodes.lab.crash(SPARE)
    answer = ask(nodes, "rollback", job.name, "--lost", SPARE)
    assert {rank["rank"]: rank["node"] for rank in answer["ranks"]} == {0: ONE, 1: TWO}
    job.await_progress(3)
    nodes.lab.boot(SPARE)
    assert job.where() == {0: ONE, 1: TWO}
    assert len(nodes.processes_of(str(job.end))) == 2

    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the snapshot to be removed with its job", lambda: snapshots(nodes, job.name) == [])
    until("nothing to be left", lambda: not nodes.leftovers())


def _roll_back_after_a_loss(torch_lab: TorchLab, job: TorchJob) -> None:
    """Kills rank 1, and waits until its protection, which runs beside rank 0, has rolled the job back."""
    ranks = torch_lab.cluster.processes_of(str(job.end))
    (one,) = [pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(one, signal.SIGKILL)
    until("the rollback", lambda: ", down " in job.agents[0].text(), 240)
    job.await_progress(3)


@pytest.mark.timeout(900)
def test_protected_ddp_job_goes_on_after_a_rank_was_killed_and_a_node_lost(torch_lab: TorchLab) -> None:
    """`migrator run --protect` rolls the job back without being asked. Its keepers hold back the failure of the killed rank
    and of the rank that waits for it, so the launchers notice nothing."""
    nodes = torch_lab.cluster
    written = nodes.folder / "written.log"
    for former in nodes.folder.glob(f"{written.name}.*"):  # of an earlier run
        former.unlink()
    torch_lab.run_options = ("--protect", "10m", "--cluster", str(nodes.lab.cluster_path))
    how = ("--pace-s", "0.3", "--until", "{end}", "--log", str(written))
    job = torch_lab.plain("ddp.py", *how, nodes=(ONE, TWO), name="protected")
    said = job.agents[0].text
    job.await_steps(5)
    until("the first snapshot", lambda: ", paused " in said())
    until("one of the job in training", lambda: nodes.migrator("job", "snapshot", job.name).returncode == 0)
    job.await_progress(3)
    _roll_back_after_a_loss(torch_lab, job)
    assert all(agent.process.poll() is None for agent in job.agents), job.text()
    assert len(nodes.processes_of(str(job.end))) == 2
    nodes.move(job.agents[0], SPARE, rank=1)
    job.await_progress(3)
    before = said().count(", down ")
    nodes.lab.crash(SPARE)  # no operator declares it dead; it counts as cut off after a long silence
    until("the second rollback", lambda: said().count(", down ") > before, 240)
    job.await_progress(3)
    nodes.lab.boot(SPARE)
    assert job.where() == {0: ONE, 1: TWO}
    rollbacks = json.loads(nodes.migrator("history", "--job", job.name, "--json").stdout)["rollbacks"]
    assert any("(killed by signal 9)" in one["reason"] for one in rollbacks)
    assert any(one["text"].endswith(f"{SPARE} lost (does not answer)") for one in rollbacks)
    assert all(one["lost_s"] > 0 and one["down_s"] > 0 for one in rollbacks), rollbacks
    job.end.touch()
    assert job.finish() == [0, 0], f"{job.text()}\n{nodes.logs()}"
    for rank, lines in enumerate(job.lines()):
        file = written.with_name(f"{written.name}.{rank}")
        assert file.read_text().splitlines() == lines, "a file that was open is cut back, and written again"
        assert list(file.parent.glob(f"{file.name}.rolled-back-m-*")), "what was cut off is kept"
    torch_lab.run_options = ()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the snapshot to be removed with its job", lambda: snapshots(nodes, job.name) == [])
    until("nothing to be left", lambda: not nodes.leftovers())


@pytest.mark.timeout(900)
def test_protected_job_of_torchrun_is_rolled_back_with_its_store(torch_lab: TorchLab) -> None:
    """As users start it, with --master-addr: the launcher would host the store of its ranks."""
    nodes = torch_lab.cluster
    torch_lab.run_options = ("--protect", "10m", "--cluster", str(nodes.lab.cluster_path))
    job = torch_lab.torchrun("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="elastic")
    torch_lab.run_options = ()
    said = job.agents[0].text
    job.await_steps(5)
    until("the first snapshot", lambda: ", paused " in said())
    job.await_progress(3)
    _roll_back_after_a_loss(torch_lab, job)
    job.end.touch()  # the job makes a new group now, with the store
    assert job.finish() == [0, 0], f"{job.text()}\n{nodes.logs()}"
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())


@ONE_OF_A_KIND
@pytest.mark.timeout(900)
def test_protected_job_goes_on_after_the_node_of_its_coordinator_was_lost(torch_lab: TorchLab) -> None:
    """Nobody declares that node dead, and one other node alone keeps the images: a third one, which keeps none, has a vote.
    When the lost node is back, it learns that another one coordinates the job."""
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="orphaned")
    job.await_steps(5)
    nodes.move(job.agents[0], SPARE, rank=0)
    with protected(job.cluster, job.name) as said:
        until("the first snapshot", lambda: ", paused " in said.read_text())
        (known,) = snapshots(nodes, job.name)
        assert known["coordinator"] == SPARE
        nodes.lab.crash(SPARE)  # a snapshot that is reported can be used at once, whichever node is lost
        until("the rollback", lambda: ", down " in said.read_text(), 300)
        assert job.where() == {0: ONE, 1: TWO}, said.read_text()
        job.await_progress(3)
        nodes.lab.boot(SPARE)
        until(
            "the former coordinator to learn of its successor",
            lambda: [one["coordinator"] for one in snapshots(nodes, job.name)] == [TWO],
        )
        assert len(nodes.processes_of(str(job.end))) == 2

    for rank in (0, 1):  # from the node that coordinates the job since
        nodes.move(job.agents[0], SPARE, rank=rank)
    second = ask(nodes, "snapshot", job.name)
    assert second["coordinator"] == SPARE, "the node that has no rank of the job any more may be switched off"
    ask(nodes, "rollback", job.name)
    job.await_progress(3)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the snapshots to be removed with their job", lambda: snapshots(nodes, job.name) == [])
    until("nothing to be left", lambda: not nodes.leftovers())


def _exits_of_a_faulty_job(torch_lab: TorchLab, protect: bool) -> tuple[list[int], str, str]:
    """Runs a job whose rank 1 raises at a certain step. Returns the exit statuses, what rank 1 has printed besides its steps,
    and what `migrator protect` said."""
    nodes = torch_lab.cluster
    job = torch_lab.plain(
        "ddp.py", "--pace-s", "0.2", "--until", "{end}", "--fail", "1", nodes=(ONE, TWO), name="faulty"
    )
    fails = job.end.with_suffix(".end.fail")
    fails.unlink(missing_ok=True)
    job.await_steps(5)
    said = nodes.folder / "faulty.out"
    said.write_text("")
    guard = None
    if protect:
        with said.open("w") as out:
            command = [*MIGRATOR, "protect", job.name, "--every", "2", "--tries", "2"]
            guard = subprocess.Popen(command, env=nodes.environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        until("the first snapshot", lambda: not protect or ", paused " in said.read_text())
        steps = max(len(lines) for lines in job.lines()) + 40
        fails.write_text(f"{steps}\n")
        codes = job.finish(600)
        if guard is not None:
            assert guard.wait(120) == 1, said.read_text()
    finally:
        if guard is not None:
            guard.kill()
            guard.wait()
    printed = [line for line in job.agents[1].lines() if line.startswith("step ")]
    assert [int(line.split()[1]) for line in printed] == list(range(steps)), "each step once"
    rest = "\n".join(line for line in job.agents[1].lines() if not line.startswith(("step ", "[W")))  # with the time
    until("nothing to be left", lambda: not nodes.leftovers())
    return codes, rest, said.read_text()


@pytest.mark.timeout(1800)
def test_job_that_has_a_bug_fails_as_without_protection(torch_lab: TorchLab, request: pytest.FixtureRequest) -> None:
    """Snapshots are taken between its failures. Its launchers see one failure, after the number of tries."""
    if not request.config.getoption("--whole"):
        pytest.skip("it fails three times, and a minute passes until the last one is passed on: make test-all")
    alone, text, _ = _exits_of_a_faulty_job(torch_lab, protect=False)
    assert text.count("ValueError: rank 1 was told to fail") == text.count("Traceback") == 1, text
    codes, protected, said = _exits_of_a_faulty_job(torch_lab, protect=True)
    assert codes == alone, f"{protected}\n{said}"
    assert protected == text, said
    assert said.count(", down ") == 2, said
    assert "it is passed on" in said


@pytest.mark.timeout(900)
def test_protection_waits_for_a_job_that_is_suspended_and_protects_it_when_it_is_resumed(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="waits")
    job.await_steps(3)
    with protected(job.cluster, job.name) as said:
        until("the first snapshot", lambda: ", paused " in said.read_text())
        ask(nodes, "suspend", job.name)
        until("the protection to notice it", lambda: "the job is suspended" in said.read_text())
        ask(nodes, "resume", job.name, "--on", f"1={SPARE}")
        until("a snapshot of the resumed job", lambda: said.read_text().count(", paused ") == 2, 240)
        text = said.read_text()
        assert "the job was resumed" in text
        assert "rolling the job back" not in text, text
        assert len(snapshots(nodes, job.name)) >= 1
        job.await_progress(2)
        job.end.touch()
        job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())
