"""torch.distributed jobs move: every connection follows the rank, and no process of the job notices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from integration.harness import Cluster, until
from integration.torch_jobs import HOMES, TORCHRUN, TorchJob, TorchLab, at_rest
from tests.sampling import Sampler

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def torch_lab(wide_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(wide_lab) as lab:
        yield lab


def _travel(job: TorchJob, ranks: Sequence[int]) -> None:
    """Moves these ranks one by one, each to the node that the previous one left; then ends the job."""
    free = "spare-1"
    for rank in ranks:
        free = job.move(rank, free)["source"]
        job.await_progress(2)
    job.end.touch()
    job.assert_whole()


@pytest.mark.sampled(1, group="torchrun jobs")
def test_every_rank_of_a_torchrun_job_moves_and_rank_0_twice(torch_lab: TorchLab, sampled: Sampler) -> None:
    job = torch_lab.torchrun("ddp.py", "--pace-s", "0.1", "--until", "{end}")
    job.await_steps(5)
    _travel(job, sampled((0, 1, 2, 3, 0), 3))
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=4)


@pytest.mark.sampled(1, group="torchrun jobs")
def test_late_clients_reach_the_store_after_rank_0_moved(torch_lab: TorchLab) -> None:
    job = torch_lab.plain("ddp.py", "--pace-s", "0.1", "--until", "{end}", nodes=HOMES[:2])
    job.await_steps(5)
    with torch_lab.store_clients(job, ("node-1", "node-4")) as ask:
        for to in ("spare-1", "node-3"):
            job.move(0, to)
            job.await_progress(2)
            assert ask() == ["there", "there"], f"while the store is on {to}"
    job.make_group()  # connections to addresses that the rank has left; they move later
    job.move(1, "spare-1")
    job.await_progress(2)
    job.move(0, "node-4")
    job.await_progress(2)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)


@pytest.mark.sampled(1, group="torchrun jobs")
def test_stream_of_all_reduces_moves_with_full_queues(torch_lab: TorchLab) -> None:
    job = torch_lab.torchrun("allreduce.py", "--until", "{end}", nodes=HOMES[:3])
    job.await_steps(5)
    _travel(job, (0, 2))
    assert len({tuple(lines) for lines in job.lines()}) == 1


@pytest.mark.sampled(1, group="torchrun jobs")
def test_one_of_two_workers_of_a_node_moves(torch_lab: TorchLab) -> None:
    """With --standalone the agent's store and all connections of the workers are on one node."""
    options = ("--standalone", "--nproc-per-node=2")
    job = torch_lab.torchrun(
        "ddp.py", "--pace-s", "0.1", "--until", "{end}", nodes=HOMES[:1], launcher=(TORCHRUN, *options)
    )
    job.await_steps(10)
    job.move(1, "spare-1")
    job.await_progress(4)
    job.move(0, "node-2")
    job.await_progress(4)
    job.move(1, "node-1")
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)


@pytest.mark.sampled(1, group="torchrun jobs")
def test_data_loaders_and_a_checkpoint_being_written_move(torch_lab: TorchLab) -> None:
    folder = torch_lab.cluster.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    job = torch_lab.torchrun("ddp_loader.py", "--checkpoints", str(folder), "--until", "{end}", nodes=HOMES[:2])
    job.await_steps(5)
    _travel(job, (0, 1))
    torch_lab.assert_as_undisturbed(job, "ddp_loader.py", "--checkpoints", str(folder), world=2)


@pytest.mark.sampled(1, group="ways to start torch jobs")
@pytest.mark.parametrize("after_a_move", [False, True])
def test_torchrun_reports_a_rank_that_raises(torch_lab: TorchLab, after_a_move: bool) -> None:
    job = torch_lab.torchrun("ddp.py", "--pace-s", "0.1", "--until", "{end}", "--fail", "1", nodes=HOMES[:1], workers=2)
    job.await_steps(10)
    if after_a_move:
        job.move(1, "spare-1")
        job.await_progress(4)
    job.end.touch()
    assert job.finish() == [1], job.text()
    report = job.agents[0].text()
    assert "ChildFailedError" in report, report
    assert "rank      : 1 (local_rank: 1)" in report, report
    assert "exitcode  : 1 " in report, report
    assert report.count("ValueError: rank 1 was told to fail") >= 2, report  # the rank's own traceback, and the agent's
    until("both ranks to be gone", lambda: not job.where())


@pytest.mark.sampled(1, group="ways to start torch jobs")
@pytest.mark.parametrize("after_a_move", [False, True])
def test_sigterm_to_the_agent_ends_its_workers(torch_lab: TorchLab, after_a_move: bool) -> None:
    job = torch_lab.torchrun("ddp.py", "--pace-s", "0.1", "--until", "{end}", nodes=HOMES[:1], workers=2)
    job.await_steps(10)
    if after_a_move:
        job.move(1, "spare-1")
        job.await_progress(4)
    job.agents[0].process.terminate()
    assert job.finish() == [1], job.text()
    assert "SignalException: Process" in job.text(), job.text()
    assert "got signal: 15" in job.text()
    until("both ranks to be gone", lambda: not job.where())


@pytest.mark.sampled(1, group="ways to start torch jobs")
@pytest.mark.parametrize("script", ["hf_trainer.py", "lightning_fit.py"])
def test_third_party_training_code_moves(torch_lab: TorchLab, script: str) -> None:
    out = ("--out", str(torch_lab.cluster.folder / "models"), "--steps", "150")
    job = torch_lab.torchrun(script, *out, "--pace-s", "0.6", "--until", "{end}", nodes=HOMES[:2])
    job.await_steps(5)
    job.move(1, "spare-1")
    job.await_progress(3)
    job.move(0, "node-2")
    job.await_progress(3)
    job.end.touch()
    job.assert_whole()
    assert job.lines() == torch_lab.undisturbed(script, *out, world=2)


@pytest.mark.sampled(1, group="ways to start torch jobs")
def test_ranks_of_mp_spawn_move_together(torch_lab: TorchLab) -> None:
    job = torch_lab.plain("spawned.py", "--steps", "400", "--pace-s", "0.3", "--until", "{end}", nodes=HOMES[:1])
    job.await_steps(5)
    job.move(0, "spare-1")
    job.await_progress(3)
    job.end.touch()
    job.assert_whole()


@pytest.mark.sampled(1, group="ways to start torch jobs")
@pytest.mark.parametrize("processes", [1, 2])
def test_workers_of_accelerate_move(torch_lab: TorchLab, processes: int) -> None:
    """accelerate starts one process itself, and several through torchrun."""
    options = [
        "launch",
        "--num_machines=1",
        f"--num_processes={processes}",
        "--mixed_precision=no",
        "--dynamo_backend=no",
    ]
    options += ["--multi_gpu"] if processes > 1 else ["--cpu"]
    launcher = (str(Path(sys.executable).with_name("accelerate")), *options)
    job = torch_lab.torchrun("ddp.py", "--pace-s", "0.1", "--until", "{end}", nodes=HOMES[:1], launcher=launcher)
    job.await_steps(10)
    job.move(processes - 1, "spare-1")
    job.await_progress(4)
    job.end.touch()
    job.assert_whole()
