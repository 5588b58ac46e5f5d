"""A move of a GPU rank that goes wrong after the driver has touched it: the job goes on, bit for bit, or is said to be lost.

Nothing here is stubbed: faults are injected in the daemons, processes are killed, and the memory is really gone. Where a
moment in the middle of a copy is wanted, the job has so much device memory that the copy takes seconds, and the moment is
seen from outside: the process grows, or has the driver's descriptors again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from integration.drill import kill
from integration.gpu.gpu_jobs import (
    GIB,
    ON_GPU,
    PATIENCE_S,
    SOURCE,
    STEPS,
    TARGET,
    Training,
    Undisturbed,
    answer,
    await_while,
    cuda_helpers,
    holds_gpu,
    measured,
    needs_cuda,
    needs_gpu,
    record,
    resident_bytes,
    undisturbed_runs,
)
from integration.harness import WORKLOADS, Cluster, until
from snapshotd.faults import Point

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


def _begin(nodes: Cluster, training: Training) -> subprocess.Popen[str]:
    return nodes.begin_move(training.job, TARGET, more=LEASE)


def _told(asked: subprocess.Popen[str], nodes: Cluster, allowed: set[str]) -> dict[str, Any]:
    told = answer(asked, nodes)
    assert told.get("outcome") in allowed, f"{told}\n{nodes.logs()}"
    return told


def _dies(nodes: Cluster, node: str) -> None:
    """The daemon was killed, by us or by its fault; a new one takes its place."""
    until(f"the end of the daemon of {node}", lambda: nodes.lab.daemon_pid(node) is None, 30)
    nodes.lab.start_daemon(node)


def _points(*points: Point) -> Sequence[Point]:
    """A job without a GPU never reaches some of them."""
    return [point for point in points if ON_GPU or point not in {Point.LOCKED, Point.CHECKPOINTED}]


# ---------------------------------------------------------------- the dump fails, the daemons die


def test_a_dump_that_fails_after_the_checkpoint_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = Training.start(nodes, "gpu-undo-dump", SMALL)
    training.await_moment()
    seen: dict[str, Any] = {}
    for point in _points(Point.LOCKED, Point.CHECKPOINTED, Point.BEFORE_DUMP, Point.DUMPING):
        nodes.fault(SOURCE, point, "fail")
        seen[point] = measured(_told(_begin(nodes, training), nodes, UNDONE))
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
    for point in _points(Point.LOCKED, Point.CHECKPOINTED, Point.FREEZE):
        nodes.fault(SOURCE, point, "kill")
        asked = _begin(nodes, training)
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
    nodes.fault(TARGET, Point.CUDA_RESTORED, "kill")
    asked = _begin(nodes, training)
    await_while(asked, "the fault at cuda-restored", lambda: nodes.fired(TARGET), nodes)
    _dies(nodes, TARGET)
    told = _told(asked, nodes, NOT_MOVED)
    training.runs_on(SOURCE)
    again = training.move(TARGET)
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-target-daemon-killed-restored", steps=steps, told=measured(told), retry=measured(again))


@needs_cuda()
def test_the_targets_daemon_is_killed_in_the_cuda_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-target", LARGE)
    training.await_moment()
    asked = _begin(nodes, training)
    await_while(asked, "the CUDA restore", lambda: _restoring(training), nodes)
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
    training = Training.start(nodes, "gpu-undo-checkpoint", LARGE)
    training.await_moment()
    pid = training.pid()
    assert pid is not None
    before = resident_bytes(pid)
    asked = _begin(nodes, training)
    await_while(asked, "a checkpoint under way", lambda: resident_bytes(pid) > before + GROWN_BYTES, nodes)
    assert holds_gpu(pid), "the checkpoint was over before anybody could be killed in it: more memory is needed"
    _kill_helpers(SOURCE)
    told = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-checkpoint", steps=steps, told=measured(told))


@needs_cuda()
def test_the_helper_is_killed_in_the_restore(nodes: Cluster, undisturbed: Undisturbed) -> None:
    undisturbed.want(LARGE)
    training = Training.start(nodes, "gpu-undo-restore", LARGE)
    training.await_moment()
    asked = _begin(nodes, training)
    await_while(asked, "the CUDA restore", lambda: _restoring(training), nodes)
    _kill_helpers(TARGET)
    told = _told(asked, nodes, {"moved", "undone"})
    training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
    steps = training.ends_as(undisturbed.want(LARGE))
    record("undo-helper-killed-restore", steps=steps, told=measured(told))


def _restoring(training: Training) -> bool:
    """The target's copy has the driver's descriptors again: they come with the restore, before the memory does."""
    copy = training.pid(TARGET)
    return copy is not None and holds_gpu(copy)


def _kill_helpers(node: str) -> None:
    helpers = cuda_helpers(node)
    assert helpers, f"nobody calls the driver on {node}"
    for pid in helpers:
        with suppress(ProcessLookupError):
            kill(pid)


# ---------------------------------------------------------------- device memory is short


class Hog:
    """Another tenant of the GPU, who takes what is free when told to."""

    def __init__(self, nodes: Cluster, leave_mib: int) -> None:
        stem = nodes.folder / f"hog-{time.monotonic_ns()}"
        self.go, self.release, self.out = (stem.with_suffix(f".{end}") for end in ("go", "release", "out"))
        command = [sys.executable, str(WORKLOADS / "gpu_hog.py"), str(self.go), str(self.release), str(leave_mib)]
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._await("WAITING")

    def take(self) -> float:
        """GiB that it got."""
        self.go.touch()
        self._await("TAKEN")
        return round(int(self.out.read_text().split("TAKEN ")[1].split()[0]) / GIB, 1)

    def let_go(self) -> None:
        self.release.touch()
        self.process.wait(60)

    def _await(self, word: str) -> None:
        def told() -> bool:
            text = self.out.read_text()
            assert self.process.poll() is None or word in text, text
            return word in text

        until(f"{word} of the hog", told, 60)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for path in (self.go, self.release, self.out):
            path.unlink(missing_ok=True)


@contextmanager
def _hog(nodes: Cluster, leave_mib: int) -> Iterator[Hog]:
    hog = Hog(nodes, leave_mib)
    try:
        yield hog
    finally:
        hog.end()


@needs_cuda()
def test_the_gpu_is_full_when_the_target_wants_it_back(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """One machine: the source cannot have its memory back either until the other tenant lets go. Then it must."""
    training = Training.start(nodes, "gpu-undo-full", SMALL)
    undisturbed.settled()
    training.await_moment()
    with _hog(nodes, leave_mib=64) as hog:
        nodes.fault(SOURCE, Point.BEFORE_DUMP, "wait")
        asked = _begin(nodes, training)
        await_while(asked, "the fault at before-dump", lambda: nodes.fired(SOURCE), nodes)
        taken = hog.take()
        (nodes.run_dir(SOURCE) / f"{Point.BEFORE_DUMP}.go").touch()
        await_while(asked, "the target's copy", lambda: training.pid(TARGET), nodes)
        until("the target to give up", lambda: training.pid(TARGET) is None or asked.poll() is not None, PATIENCE_S)
        time.sleep(3)  # the source tries to have its memory back in vain
        hog.let_go()
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
    with _hog(nodes, leave_mib=512) as hog:
        taken = hog.take()
        told = _told(_begin(nodes, training), nodes, {"moved", "refused"})
        if told["outcome"] == "refused":
            assert "gpu-memory" in told["reason"], told["reason"]
        training.runs_on(TARGET if told["outcome"] == "moved" else SOURCE)
        hog.let_go()
    steps = training.ends_as(undisturbed.want(SMALL))
    record("undo-gpu-full-before", taken_gib=taken, steps=steps, told=measured(told))


def _ended(training: Training) -> bool:
    return training.job.process.poll() is not None
