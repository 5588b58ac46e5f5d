"""Memory of a rank that is snapshotted is copied while the rank goes on, from a twin: what a rollback restores is what the
rank had, page by page, and whatever is killed, the rank goes on, no twin is left, and the former snapshot is kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from integration.harness import PATIENCE_S, SHORT_LEASE, Cluster, Job, until
from integration.job_commands import WHOLE_JOBS, ask
from integration.job_device_memory import asking
from integration.offloads import UNDONE
from snapshotd.runtime.faults import Point
from tests.kernel import needs_page_scans

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900), needs_page_scans, WHOLE_JOBS]

ONE = "node-1"
MIB = 96
PROGRAM = "dirty.py"


def twins(nodes: Cluster) -> list[int]:
    return nodes.twins_of(PROGRAM)


class Dirty:
    """A rank that writes its memory all the time, and checks every page in the end."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes, self.end = nodes, nodes.folder / "twins-end"
        self.end.unlink(missing_ok=True)
        how = ("--mib", str(MIB), "--pages-per-step", "2", "--pace-s", "0.02", "--end-file", str(self.end))
        self.job: Job = nodes.workload(ONE, PROGRAM, *how)
        self.job.await_lines(5)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """The parts of one that must succeed."""
        taken = ask(self.nodes, "snapshot", self.job.name)
        assert taken["warnings"] == []
        return {part["name"]: part for part in taken["parts"]}

    def goes_on(self) -> None:
        self.job.await_progress()
        until("all twins to end", lambda: not twins(self.nodes))

    def kill(self) -> None:
        (rank,) = self.nodes.processes_of(PROGRAM)
        os.kill(rank, signal.SIGKILL)

    def rolls_back(self) -> None:
        """To the last snapshot that counts, after a loss. Twice: the copy shares the pages of the image, which must stay."""
        for _ in range(2):
            self.goes_on()
            self.kill()
            ask(self.nodes, "rollback", self.job.name)
        self.goes_on()

    def ends_well(self) -> None:
        self.job.end_soon(self.end)
        assert self.job.finish() == 0, self.job.text()[-2000:]
        lines = self.job.lines()
        assert lines[-2:] == ["DONE", "SAME"], self.job.text()[-500:]
        assert lines[1:-2] == [f"step {number}" for number in range(len(lines) - 3)], "each step is printed once"
        until("nothing to be left", lambda: not self.nodes.leftovers())


@pytest.fixture
def dirty(nodes: Cluster) -> Iterator[Dirty]:
    yield Dirty(nodes)
    until("all twins to end", lambda: not twins(nodes))


def test_memory_is_copied_while_the_rank_goes_on_and_comes_back_as_it_was(dirty: Dirty) -> None:
    """Also from a snapshot of a rank that was itself restored from one."""
    nodes = dirty.nodes
    for _ in range(2):
        with asking(nodes, ONE, Point.COPYING, "wait", "snapshot", dirty.job.name) as asked:
            dirty.job.await_progress(20)
            assert len(twins(nodes)) == 1
        assert asked.code == 0, f"{asked.answer} {asked.errors} {nodes.logs()}"
        parts = {part["name"]: part for part in asked.answer["parts"]}
        assert parts["save-host"]["bytes"] > MIB << 19, parts
        assert parts["criu-dump"]["bytes"] < parts["save-host"]["bytes"], parts
        assert "twin" in parts
        dirty.rolls_back()
    dirty.ends_well()


def test_twin_that_is_killed_before_the_dump_costs_only_time(dirty: Dirty) -> None:
    with asking(dirty.nodes, ONE, Point.TWINNED, "wait", "snapshot", dirty.job.name) as asked:
        (twin,) = twins(dirty.nodes)
        os.kill(twin, signal.SIGKILL)
        until("it to be gone", lambda: not twins(dirty.nodes))
    assert asked.code == 0, f"{asked.answer} {asked.errors} {dirty.nodes.logs()}"
    parts = {part["name"]: part for part in asked.answer["parts"]}
    assert "save-host" not in parts
    assert parts["criu-dump"]["bytes"] > MIB << 20
    dirty.rolls_back()
    dirty.ends_well()


def test_snapshot_whose_twin_is_killed_does_not_count(dirty: Dirty) -> None:
    dirty.snapshot()
    with asking(dirty.nodes, ONE, Point.COPYING, "wait", "snapshot", dirty.job.name) as asked:
        (twin,) = twins(dirty.nodes)
        os.kill(twin, signal.SIGKILL)
        until("it to be gone", lambda: not twins(dirty.nodes))
    assert asked.code == UNDONE, f"{asked.answer} {asked.errors}"
    assert "has ended" in asked.answer["reason"]
    dirty.rolls_back()
    dirty.snapshot()
    dirty.rolls_back()
    dirty.ends_well()


def test_rank_that_is_killed_while_its_twin_is_copied_comes_back(dirty: Dirty) -> None:
    dirty.snapshot()
    with asking(dirty.nodes, ONE, Point.COPYING, "wait", "snapshot", dirty.job.name):
        dirty.kill()
    until("all twins to end", lambda: not twins(dirty.nodes))
    until("the rollback", lambda: dirty.nodes.migrator("job", "rollback", dirty.job.name).returncode == 0)
    dirty.goes_on()
    dirty.ends_well()


@pytest.mark.sampled(1, group="daemons of snapshots with twins")
@pytest.mark.parametrize(
    "point",
    [
        Point.TWINNED,
        Point.STOPPED,
        Point.FREEZE,
        Point.DUMPING,
        Point.STREAM,
        Point.CONTINUE,
        Point.COPYING,
        Point.COPIED,
    ],
)
def test_daemon_killed_during_a_snapshot_leaves_no_twin(dirty: Dirty, point: Point) -> None:
    """Its successor ends the twin. The snapshot does not count, and the one before it does."""
    nodes = dirty.nodes
    dirty.snapshot()
    with asking(nodes, ONE, point, "kill", "snapshot", dirty.job.name, *SHORT_LEASE) as asked:
        until("the daemon to die", lambda: nodes.lab.daemon_pid(ONE) is None)
        assert len(twins(nodes)) == 1
        nodes.lab.start_daemon(ONE, timeout_s=PATIENCE_S)
        assert twins(nodes) == [], "it is gone when the daemon serves"
    assert asked.code != 0, asked.answer
    dirty.rolls_back()
    dirty.snapshot()
    dirty.rolls_back()
    dirty.ends_well()


def test_setting_switches_it_off(dirty: Dirty) -> None:
    nodes = dirty.nodes
    path = nodes.lab.layout.node(ONE) / "snapshotd.toml"
    before = path.read_text()
    path.write_text(f"snapshot_copy_on_write = {json.dumps(False)}\n{before}")
    try:
        nodes.lab.kill_daemon(ONE)
        nodes.lab.start_daemon(ONE, timeout_s=PATIENCE_S)
        parts = dirty.snapshot()
        assert {"twin", "save-host"} & set(parts) == set()
        assert parts["criu-dump"]["bytes"] > MIB << 20
    finally:
        path.write_text(before)
        nodes.lab.kill_daemon(ONE)
        nodes.lab.start_daemon(ONE, timeout_s=PATIENCE_S)
    dirty.goes_on()
    dirty.ends_well()
