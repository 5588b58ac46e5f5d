"""A rank's memory is sent while it runs and writes it: its content stays the same, and faults leave the rank alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.drill import SOURCE, TARGET
from integration.harness import PATIENCE_S, SHORT_LEASE, Cluster, Job, until
from integration.test_network_process import network_process
from snapshotd.runtime.faults import Point
from tests.kernel import needs_page_scans

pytestmark = [pytest.mark.root, needs_page_scans]

MIB = 100
#: As fast as possible.
PRECOPY = ("--precopy-limit", "100")


def start(nodes: Cluster, *more: str) -> tuple[Job, Path]:
    end = nodes.folder / "precopy-end"
    end.unlink(missing_ok=True)
    job = nodes.workload(SOURCE, "dirty.py", "--mib", str(MIB), "--end-file", str(end), "--pace-s", "0.02", *more)
    job.await_lines(5)
    return job, end


def finish(nodes: Cluster, job: Job, end: Path) -> None:
    job.end_soon(end)
    assert job.finish() == 0, job.text()[-2000:]
    assert job.lines()[-2:] == ["DONE", "SAME"], job.text()[-500:]
    until("nothing to be left", lambda: not nodes.leftovers())


def tracked(nodes: Cluster) -> bool:
    """Whether the kernel tracks memory of the rank."""
    (pid,) = nodes.processes_of("dirty.py")
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    return any("uw" in line.split() for line in lines if line.startswith("VmFlags"))


def test_memory_that_is_written_all_the_time_moves_there_and_back(nodes: Cluster) -> None:
    job, end = start(nodes, "--children")
    for to in (TARGET, SOURCE):
        result = nodes.move(job, to, more=PRECOPY)
        assert result["precopied_bytes"] > MIB << 20, (result, nodes.logs())
        assert result["bytes"] < result["precopied_bytes"], (result, nodes.logs())
        assert result["warnings"] == []
        job.await_progress()
    finish(nodes, job, end)


@contextmanager
def move_that_waits(nodes: Cluster, job: Job) -> Iterator[int]:
    """A move that has sent one round of memory and waits; goes on after the block. Yields the pid of `migrator move`."""
    point = Point.PRECOPIED_ROUND
    nodes.fault(SOURCE, point, "wait")
    with nodes.begin_move(job, TARGET, more=(*SHORT_LEASE, *PRECOPY)) as process:
        try:
            until(f"{point}, or the end of the move", lambda: nodes.fired(SOURCE) or process.poll() is not None)
            assert process.poll() is None, (process.communicate(), nodes.logs())
            assert tracked(nodes)
            yield process.pid
            if nodes.lab.daemon_pid(SOURCE) is not None:
                (nodes.run_dir(SOURCE) / f"{point}.go").touch()
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()


def test_faults_while_memory_is_sent_leave_the_rank_running_and_untracked(
    nodes: Cluster, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--whole"):
        pytest.skip("four interrupted moves take minutes: make test-all")
    job, end = start(nodes)
    (rank,) = nodes.ps(job)

    def left() -> list[str]:
        """Of moves that were undone. One may also succeed in spite of its fault: then the rank has a cgroup with its name."""
        return [one for one in nodes.leftovers() if "m-" in one and rank["uid"] not in one]

    def goes_on() -> None:
        until("the end of the tracking", lambda: not tracked(nodes))
        job.await_progress()
        nodes.calm()
        until("nothing to be left", lambda: not left())

    with move_that_waits(nodes, job):
        nodes.lab.kill_daemon(SOURCE)
    goes_on()
    with move_that_waits(nodes, job):
        nodes.lab.kill_daemon(TARGET)
    goes_on()
    with move_that_waits(nodes, job) as operator:
        os.kill(operator, signal.SIGINT)
        until("the end of the tracking", lambda: not tracked(nodes))
    goes_on()
    with move_that_waits(nodes, job):
        os.kill(network_process(nodes, TARGET), signal.SIGKILL)
    goes_on()
    (rank,) = nodes.ps(job)
    nodes.move(job, SOURCE if rank["node"] == TARGET else TARGET, more=PRECOPY)
    job.await_progress()
    finish(nodes, job, end)
