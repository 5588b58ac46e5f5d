"""The chaos runner (`make chaos`): it finds second copies, and two minutes of random faults break no promise."""

from __future__ import annotations

import signal
import sys

import pytest

from integration.chaos.jobs import Broken, Single
from integration.chaos.kinds import KINDS
from integration.chaos.rounds import Chaos
from integration.chaos.watch import Watch
from integration.harness import PATIENCE_S, Cluster, Job, until

#: Whichever comes first.
SECONDS, ROUNDS = 120.0, 20
#: A process that works, and has the marker of a rank in its command line.
PROGRAM = "import time\nwhile True: time.sleep(0.01)"


class TwoCopies(Single):
    """A rank with a copy on each of two nodes. The second one is stopped."""

    def start(self) -> list[Job]:
        command = [sys.executable, "-c", PROGRAM, self.marker(0)]
        self.processes = [self.nodes.lab.spawn(node, command) for node in ("node-1", "node-2")]
        until("two copies", lambda: len(self.copies(0)) == 2)
        self.processes[1].send_signal(signal.SIGSTOP)
        return [Job(self.nodes.lab, self.processes[0], self.end_file, self.name)]


@pytest.mark.parametrize("held_copy_runs", [False, True])
def test_second_running_copy_is_found(nodes: Cluster, held_copy_runs: bool) -> None:
    job = TwoCopies(nodes, ["node-1"])
    job.held_copy_runs = held_copy_runs
    watch = Watch(nodes)
    watch.add(job)
    watch.start()
    try:
        until("some scans", lambda: watch.scans > 5)
        watch.check()  # the second copy is stopped
        job.processes[1].send_signal(signal.SIGCONT)
        with pytest.raises(Broken, match="two copies run"):
            until("the scan that finds it", watch.check, PATIENCE_S)
    finally:
        watch.stop()
        for process in job.processes:
            process.kill()
            process.wait()


def test_random_faults_break_no_promise(nodes: Cluster, request: pytest.FixtureRequest) -> None:
    """The command that repeats the rounds is printed if it fails. A crash of a node takes too long for it."""
    faults = [kind for kind in KINDS if kind != "node-crash"]
    report = Chaos(nodes, request.config.getoption("seed"), print, faults=faults).run(SECONDS, most=ROUNDS)
    print(report.table())
    assert report.entries
    assert report.scans
