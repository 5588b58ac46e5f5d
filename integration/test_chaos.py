"""The chaos runner (`make chaos`): it finds second copies, and two minutes of random faults break no promise."""

from __future__ import annotations

import signal
import sys

import pytest

from integration.chaos.jobs import Broken, Single
from integration.chaos.kinds import KINDS
from integration.chaos.piloted import recorded_places
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


def intent(move: str, source: str, target: str) -> tuple[str, dict[str, str]]:
    return "intent", {"id": move, "rank_uid": "single1-0-00000001", "source": source, "target": target}


def result(move: str, state: str = "moved") -> tuple[str, dict[str, str]]:
    return "result", {"id": move, "state": state}


def test_record_of_the_autopilot_says_where_a_rank_is() -> None:
    there, undone = intent("m-1", "node-1", "spare-1"), intent("m-2", "spare-1", "node-2")
    assert recorded_places([there, result("m-1"), undone, result("m-2", "undone")]) == {"single1-0-00000001": "spare-1"}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([intent("m-1", "node-1", "spare-1"), intent("m-2", "node-1", "node-2")], "while m-1 .* was in progress"),
        ([intent("m-1", "node-1", "spare-1"), result("m-1"), result("m-1")], "a second result"),
        (
            [intent("m-1", "node-1", "spare-1"), result("m-1"), intent("m-2", "node-1", "node-2")],
            "was moved to spare-1",
        ),
    ],
)
def test_record_that_shows_an_action_done_twice_is_found(records: list[tuple[str, dict[str, str]]], why: str) -> None:
    with pytest.raises(Broken, match=why):
        recorded_places(records)


def test_random_faults_break_no_promise(nodes: Cluster, request: pytest.FixtureRequest) -> None:
    """The command that repeats the rounds is printed if it fails. A crash of a node takes too long for it."""
    faults = [kind for kind in KINDS if kind != "node-crash"]
    report = Chaos(nodes, request.config.getoption("seed"), print, faults=faults).run(SECONDS, most=ROUNDS)
    print(report.table())
    assert report.entries
    assert report.scans
