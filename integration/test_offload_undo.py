"""Moves of ranks with device memory in files during which a process is killed, or a GPU is full: undone, and memory intact.

Failures and killed daemons at all points: test_memory_contract.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, SHORT_LEASE, Job, files_below, pids_in, until
from integration.offloads import LARGE, MIB, SOURCE, TARGET, UNDONE, children, start, stopped_senders
from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess import devmem, shimctl
from snapshotd.proc.tree import Process
from snapshotd.runtime.faults import Point

ENDED = 21
THREADED = (*LARGE, "--threads", "1")
#: For tests that fill up the rest of a GPU.
HALF_MIB = ("--mib", "240", "--blocks", "2", "--api", "runtime")


@pytest.fixture
def lab(fake_gpu_files_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield fake_gpu_files_lab
    fake_gpu_files_lab.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arrived", [True, False])
def test_target_daemon_restarted_before_the_restore_uses_stripes_that_arrived(lab: GpuCluster, arrived: bool) -> None:
    """Stripes that have arrived are used. The target does not wait for stripes that will never arrive."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with contextlib.ExitStack() as stack:
        if arrived:
            asked = stack.enter_context(lab.cluster.moving(job, TARGET, SOURCE, Point.STREAM))
            images = lab.cluster.run_dir(TARGET) / "images"
            until("all stripes to arrive", lambda: len(list(images.glob("m-*/device-*.done"))) == devmem.STRIPES)
        else:
            _, asked = stack.enter_context(stopped_senders(lab, job, Point.STREAM))
        lab.restart(TARGET)
    assert asked.code == (0 if arrived else UNDONE), f"{asked.answer}{asked.errors}{lab.cluster.logs()}"
    assert arrived or "did not arrive whole" in asked.answer["reason"]
    lab.ends_well(job)


# ---------------------------------------------------------------- killed during the copy


#: Copies that pass before the next one is held, so that memory is partly copied. THREADED needs eight or ten, which the
#: stripes take in turn: after so many, one stripe is complete or has its first part.
PASSED = min(devmem.STRIPES, 4) + 1
#: Before it begins, the source copies a little in each direction, and again if the files have to be enlarged first.
REHEARSED = 4


@contextlib.contextmanager
def copies_held(lab: GpuCluster, job: Job, node: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A move whose copy of device memory stops half-way on this node until the faults of SOURCE are cleared: the process
    that asked for it, and the rank's process whose memory is copied."""
    point, passed = (Point.LOCKED, REHEARSED + PASSED) if node == SOURCE else (Point.OFFLOADED, PASSED)
    home = lab.nodes[SOURCE]
    lab.cluster.fault(SOURCE, point, "wait")
    with lab.cluster.begin_move(job, TARGET, more=SHORT_LEASE) as asked:
        try:
            until(f"{point} on {SOURCE}", lambda: lab.cluster.fired(SOURCE) or asked.poll() is not None)
            for _ in range(passed):
                home.fault("copy", "slow:0")
            home.fault("copy", "hold", once=False)
            (lab.cluster.run_dir(SOURCE) / f"{point}.go").touch()
            until("a copy to be held", lambda: copying(lab, node) or asked.poll() is not None)
            assert asked.poll() is None, f"{asked.communicate()}{lab.cluster.logs()}"
            yield asked, copying(lab, node)
        finally:
            home.clear_faults()


def copying(lab: GpuCluster, node: str) -> int:
    """The process on this node whose device memory is partly copied; 0 if there is none."""
    for procs in files_below(lab.lab.layout.node_cgroup(node), "cgroup.procs"):
        for pid in pids_in(procs):
            with contextlib.suppress(SnapshotError, OSError):
                mailbox = shimctl.find(Process.of(pid))
                memory = mailbox.device_memory() if mailbox is not None else None
                if memory is not None and memory.busy and any(memory.done):
                    return pid
    return 0


class Victim(StrEnum):
    SENDER = "sender"
    RECEIVER = "receiver"
    MIGRATOR = "migrator"
    SOURCE = "source's daemon"
    TARGET = "target's daemon"
    RANK = "rank whose memory is copied"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("node", "victim", "codes"),
    [
        (SOURCE, Victim.SENDER, {0}),
        (SOURCE, Victim.RECEIVER, {0, UNDONE}),
        (SOURCE, Victim.MIGRATOR, {-signal.SIGKILL}),
        (SOURCE, Victim.SOURCE, {UNDONE}),
        (SOURCE, Victim.TARGET, {UNDONE}),
        (SOURCE, Victim.RANK, {ENDED}),
        (TARGET, Victim.MIGRATOR, {-signal.SIGKILL}),
        (TARGET, Victim.SOURCE, {0, UNDONE}),
        (TARGET, Victim.TARGET, {UNDONE}),
        (TARGET, Victim.RANK, {UNDONE}),
    ],
)
def test_process_killed_while_memory_is_copied_keeps_it_intact(
    lab: GpuCluster, node: str, victim: Victim, codes: set[int]
) -> None:
    job = start(lab, *THREADED)
    job.await_lines(5)
    with copies_held(lab, job, node) as (asked, copied):
        daemon = {Victim.SOURCE: SOURCE, Victim.TARGET: TARGET}.get(victim)
        match victim:
            case Victim.SENDER:
                os.kill(children(lab, SOURCE, "snapshotd.transport.device.send")[0], signal.SIGKILL)
            case Victim.RECEIVER:
                os.kill(children(lab, TARGET, "snapshotd.transport.device.receive")[0], signal.SIGKILL)
            case Victim.MIGRATOR:
                asked.kill()
            case Victim.RANK:
                os.kill(copied, signal.SIGKILL)
        if daemon is not None:
            lab.restart(daemon)
        lab.nodes[SOURCE].clear_faults()
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode in codes, f"{out}{errors}{lab.cluster.logs()}"
    if asked.returncode == UNDONE:
        assert json.loads(out)["where"] in {"running on source", "frozen on source"}
    if (node, victim) == (SOURCE, Victim.RANK):
        assert job.finish() != 0
        lab.nothing_left()
        return
    job.await_progress(3)
    lab.ends_well(job)


# ---------------------------------------------------------------- a full GPU


def fill_up(lab: GpuCluster, node: str) -> Job:
    """Another job takes almost all memory of a node's GPU."""
    hog = lab.job(node, "--idle-mib", "3900")
    until("the GPU to be full", lambda: lab.used_bytes(node) > 3900 * MIB)
    return hog


def test_move_is_undone_if_the_targets_gpu_is_full(lab: GpuCluster) -> None:
    job = start(lab, *HALF_MIB)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED) as asked:
        hog = fill_up(lab, TARGET)
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert "device memory" in asked.answer["reason"], f"{asked.answer}{lab.cluster.logs()}"
    hog.kill()
    job.await_progress(3)
    lab.ends_well(job)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.OFFLOADED, Point.STREAM])
def test_rank_stays_frozen_until_the_sources_gpu_has_room(lab: GpuCluster, point: Point) -> None:
    """The undo finds the GPU full. The rank continues once there is room, also after a restart of the daemon."""
    job = start(lab, *HALF_MIB)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, point) as asked:
        hog = fill_up(lab, SOURCE)
        lab.cluster.fault(TARGET, Point.BEFORE_RESTORE, "fail")
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert asked.answer["where"] == "frozen on source"
    before = job.lines()
    lab.restart(SOURCE)
    until("`migrator status` to say so", lambda: any("device memory" in move["waiting_for"] for move in moves(lab)))
    assert job.lines() == before
    hog.kill()
    until("the rank to continue", lambda: len(job.lines()) > len(before) + 3)
    lab.ends_well(job)


def moves(lab: GpuCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(lab.cluster.migrator("status", "--json").stdout)["moves"]
    return found
