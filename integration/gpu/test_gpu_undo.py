"""Moves of a GPU rank fail after the driver's checkpoint: the job continues, bit-identical, or is reported as lost.

Nothing is stubbed: faults are injected in the daemons, processes are killed, and GPU memory is really full. To hit the
middle of a copy, the job has so much device memory that the copy takes seconds. The moment is detected from outside:
the process grows, or has descriptors of the driver again.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from integration.drill import kill
from integration.gpu.gpu_jobs import (
    DEVICE_MEMORY,
    GIB,
    ON_GPU,
    PATIENCE_S,
    SOURCE,
    STEPS,
    TARGET,
    Training,
    Undisturbed,
    measured,
    needs_cuda,
    needs_gpu,
    record,
    undisturbed_runs,
)
from integration.gpu.hog import hog
from integration.gpu.watch import answer, await_while, cuda_helpers, holds_gpu, resident_bytes
from integration.harness import Cluster, until
from snapshotd.proc import tree
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500), needs_gpu()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
_LIMIT = ("--steps", str(2 * STEPS))
SMALL = ("--gib", "0.5", *_LIMIT)
LARGE = ("--gib", os.environ.get("SNAPSHOT_GPU_UNDO_GIB", "6"), *_LIMIT)
#: A process that has grown by this much is in the middle of the driver's checkpoint.
GROWN_BYTES = GIB
LEASE = ("--lease", "5")
UNDONE = {"undone"}
#: While a daemon is dead, the outcome of a move may be unknown.
NOT_MOVED = {"undone", "unknown"}


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with undisturbed_runs(FOLDER) as runs:
        runs.want(SMALL)
        yield runs


@contextmanager
def _move(nodes: Cluster, training: Training) -> Iterator[subprocess.Popen[str]]:
    """Starts a move in the background, and kills its driver afterwards if it still runs."""
    with nodes.begin_move(training.job, TARGET, more=LEASE) as asked:
        try:
            yield asked
        finally:
            asked.kill()


def _told(asked: subprocess.Popen[str], nodes: Cluster, allowed: set[str]) -> dict[str, Any]:
    result = answer(asked, nodes)
    assert result.get("outcome") in allowed, f"{result}\n{nodes.logs()}"
    return result


def _dies(nodes: Cluster, node: str) -> None:
    """Waits for the end of a daemon that was killed, by the test or by its fault, and starts a new one."""
    until(f"the end of the daemon of {node}", lambda: nodes.lab.daemon_pid(node) is None, 30)
    nodes.lab.start_daemon(node)


def _points(*points: Point) -> Sequence[Point]:
    """The points that the job reaches: without a GPU or without offloaded memory, some are never reached."""
    never = set() if ON_GPU else {Point.PARKED, Point.LOCKED, Point.CHECKPOINTED}
    if not ON_GPU or DEVICE_MEMORY != "offload":
        never |= {Point.OFFLOADED, Point.REFILLED}
    return [point for point in points if point not in never]


# ---------------------------------------------------------------- dumps that fail, killed daemons


def test_dump_that_fails_after_the_checkpoint_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-dump", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    points = (Point.PARKED, Point.LOCKED, Point.OFFLOADED, Point.CHECKPOINTED, Point.BEFORE_DUMP, Point.DUMPING)
    for point in _points(*points):
        nodes.fault(SOURCE, point, "fail")
        with _move(nodes, training) as asked:
            seen[point] = measured(_told(asked, nodes, UNDONE))
        assert nodes.fired(SOURCE), f"{point} was not reached: {seen[point]}"
        training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-dump-fails", steps=steps, at=seen, retry=measured(again))


def test_source_daemon_killed_around_the_checkpoint_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-source", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    for point in _points(Point.PARKED, Point.LOCKED, Point.OFFLOADED, Point.CHECKPOINTED, Point.FREEZE):
        nodes.fault(SOURCE, point, "kill")
        with _move(nodes, training) as asked:
            await_while(asked, f"the fault at {point}", lambda: nodes.fired(SOURCE), nodes)
            _dies(nodes, SOURCE)
            seen[point] = measured(_told(asked, nodes, NOT_MOVED))
        training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-source-daemon-killed", steps=steps, at=seen, retry=measured(again))


@needs_cuda()
def test_target_daemon_killed_after_the_cuda_restore_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-restored", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    for point in _points(Point.CUDA_RESTORED, Point.REFILLED):
        nodes.fault(TARGET, point, "kill")
        with _move(nodes, training) as asked:
            await_while(asked, f"the fault at {point}", lambda: nodes.fired(TARGET), nodes)
            _dies(nodes, TARGET)
            seen[point] = measured(_told(asked, nodes, NOT_MOVED))
        training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-target-daemon-killed-restored", steps=steps, at=seen, retry=measured(again))


@needs_cuda()
def test_target_daemon_killed_during_the_cuda_restore_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-target", LARGE, device_memory="driver")
    training.await_moment()
    nodes.fault(TARGET, Point.CUDA_RESTORED, "wait")
    with _move(nodes, training) as asked:
        await_while(asked, "the CUDA restore", _restoring(nodes, training), nodes)
        with _in_the_middle(nodes, TARGET, Point.CUDA_RESTORED):
            nodes.lab.kill_daemon(TARGET)
        _dies(nodes, TARGET)
        result = _told(asked, nodes, NOT_MOVED)
    training.runs_on(SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-target-daemon-killed-restoring", steps=steps, result=measured(result))


# ---------------------------------------------------------------- killed helpers


@needs_cuda()
def test_helper_killed_during_the_checkpoint_does_not_harm_the_job(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-checkpoint", LARGE, device_memory="driver")
    training.await_moment()
    pid = training.pid()
    assert pid is not None
    before = resident_bytes(pid)
    nodes.fault(SOURCE, Point.CHECKPOINTED, "wait")
    with _move(nodes, training) as asked:
        await_while(
            asked,
            "a checkpoint under way",
            lambda: resident_bytes(pid) > before + GROWN_BYTES or nodes.fired(SOURCE),
            nodes,
        )
        with _in_the_middle(nodes, SOURCE, Point.CHECKPOINTED):
            _kill_helpers(SOURCE)
        result = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if result["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-checkpoint", steps=steps, result=measured(result))


@needs_cuda()
def test_helper_killed_during_the_restore_does_not_harm_the_job(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-restore", LARGE, device_memory="driver")
    training.await_moment()
    nodes.fault(TARGET, Point.CUDA_RESTORED, "wait")
    with _move(nodes, training) as asked:
        await_while(asked, "the CUDA restore", _restoring(nodes, training), nodes)
        with _in_the_middle(nodes, TARGET, Point.CUDA_RESTORED):
            _kill_helpers(TARGET)
        result = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if result["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-restore", steps=steps, result=measured(result))


def _restoring(nodes: Cluster, training: Training) -> Callable[[], bool]:
    """Whether the driver has begun to restore the target's copy; also true after the restore (see `_in_the_middle`).

    The copy then has descriptors of the driver again, or criu, until then its sibling, ended a moment ago."""
    copy: int | None = None
    alone_since_s = 0.0

    def seen() -> bool:
        nonlocal copy, alone_since_s
        if copy is None:
            copy = training.pid(TARGET)
        if copy is None:
            return False
        if not alone_since_s and not _sisters(copy):
            alone_since_s = time.monotonic()
        begun = bool(alone_since_s) and time.monotonic() > alone_since_s + 0.2
        return begun or holds_gpu(copy) or nodes.fired(TARGET)

    return seen


def _sisters(pid: int) -> set[int]:
    try:
        keeper = tree.parent(pid)
        return set(map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())) - {pid}
    except (ProcessLookupError, FileNotFoundError):
        return {pid}  # the copy is gone, which the move reports


@contextmanager
def _in_the_middle(nodes: Cluster, node: str, point: Point) -> Iterator[None]:
    """Fails unless the block ends before the daemon reaches `point`, where it waits. Then lets the daemon continue."""
    early = not nodes.fired(node)
    yield
    early = early and not nodes.fired(node)
    (nodes.run_dir(node) / f"{point}.go").touch()
    assert early, f"{point} came before anybody could be killed: give SNAPSHOT_GPU_UNDO_GIB more than {LARGE[1]}"


def _kill_helpers(node: str) -> None:
    helpers = cuda_helpers(node)
    assert helpers, f"no process calls the driver on {node}"
    for pid in helpers:
        with suppress(ProcessLookupError):
            kill(pid)


# ---------------------------------------------------------------- a full GPU


@needs_cuda()
def test_move_is_undone_if_the_gpu_is_full_at_the_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """Both nodes share one GPU, so the source gets its memory back only after the other process has freed its own."""
    training = Training.start(nodes, "gpu-undo-full", SMALL)
    undisturbed.settled()
    training.await_moment()
    with hog(nodes, leave_mib=64) as tenant:
        nodes.fault(SOURCE, Point.BEFORE_DUMP, "wait")
        with _move(nodes, training) as asked:
            await_while(asked, "the fault at before-dump", lambda: nodes.fired(SOURCE), nodes)
            taken = tenant.take()
            (nodes.run_dir(SOURCE) / f"{Point.BEFORE_DUMP}.go").touch()
            _until_given_up(training, asked)
            time.sleep(3)  # the source cannot get its memory back meanwhile
            tenant.let_go()
            result = _told(asked, nodes, NOT_MOVED)
    steps = training.steps()
    until("the job to go on or to end", lambda: training.steps() > steps + 20 or _ended(training), PATIENCE_S)
    if _ended(training):
        text = f"{result.get('reason', '')}\n{nodes.logs()}"
        assert "lost" in text, f"it is gone, and no message says that the driver lost it:\n{text}"
        record("undo-gpu-full", outcome="lost", taken_gib=taken, result=measured(result))
        return
    training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record(
        "undo-gpu-full", outcome="goes on", taken_gib=taken, steps=steps, result=measured(result), retry=measured(again)
    )


@needs_cuda()
def test_rank_moves_or_is_refused_if_the_gpu_is_full_before_the_move(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """Both nodes share one GPU. The memory that the rank frees there is enough for it, so it moves, or it is refused."""
    training = Training.start(nodes, "gpu-undo-before", SMALL)
    undisturbed.settled()
    training.await_moment()
    with hog(nodes, leave_mib=2048) as tenant:
        taken = tenant.take()
        with _move(nodes, training) as asked:
            result = _told(asked, nodes, {"moved", "refused"})
        if result["outcome"] == "refused":
            assert "gpu-memory" in result["reason"], result["reason"]
        training.runs_on(TARGET if result["outcome"] == "moved" else SOURCE)
        tenant.let_go()
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-gpu-full-before", taken_gib=taken, steps=steps, result=measured(result))


def _until_given_up(training: Training, asked: subprocess.Popen[str], at_most_s: float = 60.0) -> None:
    """Waits until the target's copy is gone or the move is over; not for long, because the target may wait for room too."""
    ends_s, had_copy = time.monotonic() + at_most_s, False
    while time.monotonic() < ends_s and asked.poll() is None:
        has_copy = training.pid(TARGET) is not None
        if had_copy and not has_copy:
            return
        had_copy = has_copy
        time.sleep(0.05)


def _ended(training: Training) -> bool:
    return training.job.process.poll() is not None
