"""A move of a GPU rank that goes wrong after the driver has touched it: the job goes on, bit for bit, or is said to be lost.

Nothing here is stubbed: faults are injected in the daemons, processes are killed, and the memory is really gone. Where a
moment in the middle of a copy is wanted, the job has so much device memory that the copy takes seconds, and the moment is
seen from outside: the process grows, or has the driver's descriptors again.
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
#: So much more memory than before: the driver is in the middle of a checkpoint.
GROWN_BYTES = GIB
LEASE = ("--lease", "5")
UNDONE = {"undone"}
#: As long as a daemon is dead nobody may know how a move ended.
NOT_MOVED = {"undone", "unknown"}


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with undisturbed_runs(FOLDER) as runs:
        runs.want(SMALL)
        yield runs


@contextmanager
def _move(nodes: Cluster, training: Training) -> Iterator[subprocess.Popen[str]]:
    """A move in the background, of which nothing is left afterwards."""
    with nodes.begin_move(training.job, TARGET, more=LEASE) as asked:
        try:
            yield asked
        finally:
            asked.kill()


def _told(asked: subprocess.Popen[str], nodes: Cluster, allowed: set[str]) -> dict[str, Any]:
    told = answer(asked, nodes)
    assert told.get("outcome") in allowed, f"{told}\n{nodes.logs()}"
    return told


def _dies(nodes: Cluster, node: str) -> None:
    """The daemon was killed, by us or by its fault; a new one takes its place."""
    until(f"the end of the daemon of {node}", lambda: nodes.lab.daemon_pid(node) is None, 30)
    nodes.lab.start_daemon(node)


def _points(*points: Point) -> Sequence[Point]:
    """A job without a GPU, or whose memory the driver carries, never reaches some of them."""
    never = set() if ON_GPU else {Point.PARKED, Point.LOCKED, Point.CHECKPOINTED}
    if not ON_GPU or DEVICE_MEMORY != "offload":
        never |= {Point.PARKED_MEMORY, Point.REFILLED}
    return [point for point in points if point not in never]


# ---------------------------------------------------------------- the dump fails, the daemons die


def test_a_dump_that_fails_after_the_checkpoint_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-dump", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    points = (Point.PARKED, Point.LOCKED, Point.PARKED_MEMORY, Point.CHECKPOINTED, Point.BEFORE_DUMP, Point.DUMPING)
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


def test_the_sources_daemon_is_killed_around_the_checkpoint(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-source", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    for point in _points(Point.PARKED, Point.LOCKED, Point.PARKED_MEMORY, Point.CHECKPOINTED, Point.FREEZE):
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
def test_the_targets_daemon_is_killed_after_the_cuda_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
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
def test_the_targets_daemon_is_killed_in_the_cuda_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-target", LARGE, device_memory="driver")
    training.await_moment()
    nodes.fault(TARGET, Point.CUDA_RESTORED, "wait")
    with _move(nodes, training) as asked:
        await_while(asked, "the CUDA restore", _restoring(nodes, training), nodes)
        with _in_the_middle(nodes, TARGET, Point.CUDA_RESTORED):
            nodes.lab.kill_daemon(TARGET)
        _dies(nodes, TARGET)
        told = _told(asked, nodes, NOT_MOVED)
    training.runs_on(SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-target-daemon-killed-restoring", steps=steps, told=measured(told))


# ---------------------------------------------------------------- the helper dies


@needs_cuda()
def test_the_helper_is_killed_in_the_checkpoint(nodes: Cluster, undisturbed: Undisturbed) -> None:
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
        told = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-checkpoint", steps=steps, told=measured(told))


@needs_cuda()
def test_the_helper_is_killed_in_the_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-restore", LARGE, device_memory="driver")
    training.await_moment()
    nodes.fault(TARGET, Point.CUDA_RESTORED, "wait")
    with _move(nodes, training) as asked:
        await_while(asked, "the CUDA restore", _restoring(nodes, training), nodes)
        with _in_the_middle(nodes, TARGET, Point.CUDA_RESTORED):
            _kill_helpers(TARGET)
        told = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-restore", steps=steps, told=measured(told))


def _restoring(nodes: Cluster, training: Training) -> Callable[[], bool]:
    """Whether the driver restores the target's copy: it has the driver's descriptors again, or criu, its sister until then,
    has been gone for a moment. Also true when that is over: see `_in_the_middle`."""
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
        return {pid}  # gone, which the move will tell


@contextmanager
def _in_the_middle(nodes: Cluster, node: str, point: Point) -> Iterator[None]:
    """What the block does, it does before the daemon is at `point`, where it was told to wait; then that is over."""
    early = not nodes.fired(node)
    yield
    early = early and not nodes.fired(node)
    (nodes.run_dir(node) / f"{point}.go").touch()
    assert early, f"{point} came before anybody could be killed: give SNAPSHOT_GPU_UNDO_GIB more than {LARGE[1]}"


def _kill_helpers(node: str) -> None:
    helpers = cuda_helpers(node)
    assert helpers, f"nobody calls the driver on {node}"
    for pid in helpers:
        with suppress(ProcessLookupError):
            kill(pid)


# ---------------------------------------------------------------- device memory is short


@needs_cuda()
def test_the_gpu_is_full_when_the_target_wants_it_back(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """One machine: the source cannot have its memory back either until the other tenant lets go. Then it must."""
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
            time.sleep(3)  # the source cannot have its memory back
            tenant.let_go()
            told = _told(asked, nodes, NOT_MOVED)
    steps = training.steps()
    until("the job to go on or to end", lambda: training.steps() > steps + 20 or _ended(training), PATIENCE_S)
    if _ended(training):
        words = f"{told.get('reason', '')}\n{nodes.logs()}"
        assert "lost" in words, f"it is gone, and nobody says that the driver lost it:\n{words}"
        record("undo-gpu-full", outcome="lost", taken_gib=taken, told=measured(told))
        return
    training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-gpu-full", outcome="goes on", taken_gib=taken, steps=steps, told=measured(told), retry=measured(again))


@needs_cuda()
def test_the_gpu_is_full_before_the_move_begins(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """Source and target share the one GPU: what the rank leaves there is enough for it, so it may move; or it is refused."""
    training = Training.start(nodes, "gpu-undo-before", SMALL)
    undisturbed.settled()
    training.await_moment()
    with hog(nodes, leave_mib=2048) as tenant:
        taken = tenant.take()
        with _move(nodes, training) as asked:
            told = _told(asked, nodes, {"moved", "refused"})
        if told["outcome"] == "refused":
            assert "gpu-memory" in told["reason"], told["reason"]
        training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
        tenant.let_go()
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-gpu-full-before", taken_gib=taken, steps=steps, told=measured(told))


def _until_given_up(training: Training, asked: subprocess.Popen[str], at_most_s: float = 60.0) -> None:
    """The target had a copy and has none any more, or the move is over; some time at most, as it may wait for room too."""
    ends_s, had_copy = time.monotonic() + at_most_s, False
    while time.monotonic() < ends_s and asked.poll() is None:
        has_copy = training.pid(TARGET) is not None
        if had_copy and not has_copy:
            return
        had_copy = has_copy
        time.sleep(0.05)


def _ended(training: Training) -> bool:
    return training.job.process.poll() is not None
