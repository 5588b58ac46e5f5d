"""NCCL ranks move on the real GPU with the real library, and their output is that of undisturbed ranks.

Two ranks that share the GPU can do anything before a move. After it they can only do what needs no time-slicing of NCCL
kernels (integration/workloads/gpu_nccl.py takes turns). Collectives after a move are tested with one rank per GPU,
which here means world size 1. DEVICE=cpu runs the same tests over gloo, without NCCL.

After one of two ranks has moved, no other job may run on the GPU, because it would be time-sliced with the rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from integration.gpu.gpu_jobs import (
    DEVICE_MEMORY,
    ON_GPU,
    OTHER,
    RUN_OPTIONS,
    SOURCE,
    TARGET,
    measured,
    needs_gpu,
    record,
)
from integration.harness import Cluster
from integration.torch_jobs import BROKEN, TorchJob, TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240), needs_gpu()]

NCCL_STEPS = {"quiesce", "detach", "reattach", "open"}
OFFLOAD_PARTS = {"prepare", "offload", "refill"}
#: No test passes or fails by the clock: this only ends tests that hang.
PATIENCE_S = 90.0
ROUNDS = 10


def move(job: TorchJob, rank: int, to: str) -> dict[str, Any]:
    """Moves a rank, and checks that its communicators, if any, were destroyed and rebuilt."""
    try:
        answer = job.move(rank, to, timeout_s=PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.text()}") from None
    steps = {phase["name"] for phase in answer["phases"]}
    assert steps & NCCL_STEPS == (NCCL_STEPS if ON_GPU else set()), f"{sorted(steps)}\n{job.text()}"
    parts = {part["name"] for part in answer["parts"]}
    assert parts & OFFLOAD_PARTS == (OFFLOAD_PARTS if ON_GPU and DEVICE_MEMORY == "offload" else set()), (
        f"{answer}\n{job.text()}"
    )
    return answer


def assert_as(job: TorchJob, undisturbed: list[list[str]]) -> None:
    """The output of every rank is that of an undisturbed run, line by line."""
    for rank, (mine, theirs) in enumerate(zip(job.lines(), undisturbed, strict=True)):
        assert len(mine) <= len(theirs), f"rank {rank} went further than the undisturbed one: {len(mine)} lines"
        for own, other in zip(mine, theirs, strict=False):
            assert own == other, f"rank {rank}, the first difference:\n  moved       {own}\n  undisturbed {other}"


def ends_well(job: TorchJob) -> None:
    """Ends the job. No process has seen a connection break, but NCCL may log that its peer closed first."""
    job.end.touch()
    codes = job.finish(PATIENCE_S)
    assert set(codes) == {0}, f"{codes}\n{job.text()}\n{job.cluster.logs()}"
    assert all("DONE" in agent.lines() for agent in job.agents), job.text()
    lines = [line for agent in job.agents for line in agent.lines() if " NCCL " not in line]
    assert [line for line in lines if BROKEN.search(line)] == []


def said_wrong(job: TorchJob) -> list[str]:
    return [line for agent in job.agents for line in agent.lines() if line.startswith("WRONG")]


# ---------------------------------------------------------------- one rank per GPU: any collective, before and after

KINDS = ("ddp", "fsdp", "compile")


class Alone:
    """The jobs with one rank, started in advance; each waits for its test."""

    def __init__(self, lab: TorchLab, kinds: list[str]) -> None:
        self.lab = lab
        self.pool = ThreadPoolExecutor(2 * len(KINDS))
        self.undisturbed = {kind: self.pool.submit(self._undisturbed, kind) for kind in kinds}
        self.jobs: dict[str, Future[TorchJob]] = {kind: self.pool.submit(self._start, kind) for kind in kinds}

    def _undisturbed(self, kind: str) -> list[list[str]]:
        return self.lab.undisturbed("gpu_nccl_alone.py", "--kind", kind, "--pace-s", "0", world=1)

    def _start(self, kind: str) -> TorchJob:
        if kind == "compile":  # uses the compiled kernels of the undisturbed run
            self.undisturbed[kind].result()
        go_and_end = ("--go", "{end}.go", "--until", "{end}")
        return self.lab.plain("gpu_nccl_alone.py", "--kind", kind, *go_and_end, nodes=(SOURCE,), name=f"nccl{kind}")

    def end(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.lab.end()
        self.pool.shutdown()


@pytest.fixture(scope="class")  # so that none of them is on the GPU when the two ranks use it
def alone(request: pytest.FixtureRequest, plain_lab: Cluster) -> Iterator[Alone]:
    wanted = {
        item.callspec.params["kind"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.cls is TestOneRankPerGpu
    }
    made = Alone(TorchLab(plain_lab, RUN_OPTIONS), [kind for kind in KINDS if kind in wanted])
    try:
        yield made
    finally:
        made.end()


class TestOneRankPerGpu:
    @pytest.mark.parametrize("kind", KINDS)
    def test_rank_moves_there_and_back(self, alone: Alone, kind: str) -> None:
        chance = random.Random(seed := time.time_ns() % 2**31)
        try:
            job = alone.jobs[kind].result(PATIENCE_S)
        except AssertionError as error:
            why = [line for line in str(error).splitlines() if line.startswith("SKIP ")]
            if not why:
                raise
            pytest.skip(why[0][5:])
        job.await_steps(1, PATIENCE_S)
        job.end.with_name(f"{job.end.name}.go").touch()
        results = []
        for to in (TARGET, SOURCE):
            job.await_progress(chance.randint(5, 30), PATIENCE_S)
            time.sleep(chance.uniform(0, 0.06))
            results.append(measured(move(job, 0, to)))
            job.await_progress(ROUNDS, PATIENCE_S)
            assert job.where() == {0: to}
        ends_well(job)
        assert " digest " in job.lines()[0][-1]
        assert_as(job, alone.undisturbed[kind].result(PATIENCE_S))
        record(f"nccl-{kind}", seed=seed, steps=len(job.lines()[0]), moves=results)


# ---------------------------------------------------------------- two ranks on one GPU: in turns


@pytest.fixture
def torch_lab(nodes: Cluster) -> Iterator[TorchLab]:
    with at_rest(nodes, RUN_OPTIONS) as lab:
        yield lab


def test_one_of_two_ranks_that_take_turns_on_one_gpu_moves(torch_lab: TorchLab) -> None:
    chance = random.Random(seed := time.time_ns() % 2**31)
    turns = torch_lab.cluster.folder / f"turns-{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(torch_lab.undisturbed, "gpu_nccl.py", "--pace-s", "0", "--margin-s", "0", world=2)
        flags = ("--turns", str(turns), "--until", "{end}")
        job = torch_lab.plain("gpu_nccl.py", *flags, nodes=(SOURCE, OTHER), name="nccl")
        job.await_steps(8, PATIENCE_S)
        undisturbed = alone.result()  # from here on only the job uses the GPU
    turns.touch()
    results = []
    try:
        job.await_progress(2, PATIENCE_S)
        for to in (TARGET, OTHER):
            time.sleep(chance.uniform(0, 0.5))
            results.append(move(job, 1, to))
            job.await_progress(ROUNDS, PATIENCE_S)
            assert job.where() == {0: SOURCE, 1: to}
            assert said_wrong(job) == []
    finally:
        turns.unlink()
    ends_well(job)
    assert_as(job, undisturbed)
    moves = [{"peers_stopped_s": answer.get("peers_stopped_s"), **measured(answer)} for answer in results]
    record("nccl-two-ranks", seed=seed, steps=len(job.lines()[0]), moves=moves)
