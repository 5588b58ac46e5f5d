"""The network process of a daemon has no privileges, and its death during a move loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import sys
from pathlib import Path

import pytest

from integration.drill import MOVED, SOURCE, TARGET, UNDONE, Drill
from integration.harness import Cluster, until
from snapshotd.runtime.faults import Point
from snapshotd.sandbox import filter as seccomp

#: Tries to open files with exactly the privileges of a network process, and prints which could be opened.
PROBE = """
import json, sys
from snapshotd.network.process import give_up_privileges
user_id, group_id, folder, *paths = sys.argv[1:]
give_up_privileges(int(user_id), int(group_id), folder)
opened = []
for path in paths:
    try:
        open(path, "rb").close()
        opened.append(path)
    except OSError:
        pass
print(json.dumps(opened))
"""


def network_process(nodes: Cluster, node: str) -> int:
    daemon = nodes.lab.daemon_pid(node)
    assert daemon is not None

    def found() -> int | None:
        for child in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that has just ended
                if Path(f"/proc/{child}/comm").read_text() == "snapshotd-net\n":
                    return int(child)
        return None

    return int(until(f"the network process of {node}", found))


def kill_network_process(drill: Drill, node: str) -> None:
    before = network_process(drill.nodes, node)
    os.kill(before, signal.SIGKILL)
    until(f"another network process on {node}", lambda: network_process(drill.nodes, node) != before)


def test_network_process_has_no_privileges_and_reaches_no_files(nodes: Cluster) -> None:
    job = nodes.workload(SOURCE, "chain.py")
    job.await_lines(2)
    nodes.move(job, TARGET)  # so that there is a journal
    pid = network_process(nodes, TARGET)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    user = pwd.getpwnam("nobody")
    assert set(status["Uid"].split()) == {str(user.pw_uid)}
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Groups"].strip()) == ("1", "")
    assert status["Seccomp"] == ("2" if seccomp.available() else "0")

    layout = nodes.lab.layout
    (rank,) = nodes.processes_of("chain.py")
    journals = [path for path in (layout.state / TARGET).rglob("*") if path.is_file()]
    assert journals
    secrets = [str(layout.node(TARGET) / "tls.key"), f"/proc/{rank}/mem", *map(str, journals)]
    # As root inside the node, where the daemon sees them, all of them can be opened.
    command = [sys.executable, "-c", PROBE, str(user.pw_uid), str(user.pw_gid), "/run/snapshotd/network-gone"]
    shown = [*secrets, "/etc/passwd"]
    as_root = [sys.executable, "-c", "import sys\nfor path in sys.argv[1:]: open(path, 'rb').close()", *shown]
    assert nodes.lab.spawn(TARGET, as_root).wait(60) == 0
    out = nodes.folder / "probe.out"
    with out.open("wb") as file:
        assert nodes.lab.spawn(TARGET, [*command, *shown], stdout=file).wait(60) == 0
    assert json.loads(out.read_text()) == ["/etc/passwd"]


@pytest.mark.sampled(2, cover="point")
@pytest.mark.parametrize("point", [Point.BEGIN, Point.FREEZE, Point.DUMPING, Point.STREAM])
def test_network_process_of_the_source_killed_before_commit_is_undone(drill: Drill, point: Point) -> None:
    with drill.waiting_at(SOURCE, point):
        kill_network_process(drill, SOURCE)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


def test_network_process_of_the_source_killed_when_commit_is_asked_for_loses_nothing(drill: Drill) -> None:
    """The driver asks again. The rank is where the journal says, whether that is in time for its lease or not."""
    with drill.waiting_at(SOURCE, Point.BEFORE_COMMIT):
        kill_network_process(drill, SOURCE)
    moved = drill.expect(MOVED, UNDONE).verdict == MOVED
    drill.finish(TARGET if moved else SOURCE)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.COMMIT, Point.BEFORE_RELEASE])
def test_network_process_of_the_source_killed_after_commit_completes_the_move(drill: Drill, point: Point) -> None:
    with drill.waiting_at(SOURCE, point):
        kill_network_process(drill, SOURCE)
    drill.expect(MOVED)
    drill.finish(TARGET)


@pytest.mark.sampled(2, cover="point")
@pytest.mark.parametrize("point", [Point.PREPARE, Point.SEAL, Point.RESTORING, Point.RESTORED])
def test_network_process_of_the_target_killed_before_commit_is_undone(drill: Drill, point: Point) -> None:
    with drill.waiting_at(TARGET, point):
        kill_network_process(drill, TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_ACTIVATE, Point.ACTIVATED])
def test_network_process_of_the_target_killed_after_commit_completes_the_move(drill: Drill, point: Point) -> None:
    with drill.waiting_at(TARGET, point):
        kill_network_process(drill, TARGET)
    drill.expect(MOVED)
    drill.finish(TARGET)


def test_relay_of_a_moved_rank_survives_the_death_of_network_processes(drill: Drill) -> None:
    """Its output goes through both of them. The keepers send again what was lost."""
    drill.nodes.move(drill.job, TARGET)
    drill.job.await_progress(2)
    for node in (SOURCE, TARGET):
        kill_network_process(drill, node)
        drill.job.await_progress(5)
    drill.end()
