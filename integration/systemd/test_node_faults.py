"""Daemons and whole nodes that stop in the middle of a move, or while ranks run. In every case one copy of the rank runs."""

from __future__ import annotations

import pytest

from integration.harness import until
from integration.systemd.cluster import SystemdCluster

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

RESTART = ("systemctl", "restart", "snapshotd")
KILL = ("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "snapshotd")


@pytest.mark.parametrize(
    ("node", "point", "how"),
    [
        ("node-1", "stream", RESTART),
        ("node-2", "restored", RESTART),
        ("node-1", "dumping", KILL),
        ("node-2", "restoring", KILL),
    ],
    ids=["restart-source", "restart-target", "kill-source", "kill-target"],
)
def test_a_daemon_that_stops_in_the_middle_of_a_move_leaves_one_rank(
    installed: SystemdCluster, node: str, point: str, how: tuple[str, ...]
) -> None:
    job = f"stopped-{point}"
    out = installed.start_job(job)
    place = installed.nodes[node]
    driver = installed.stopped_at(job, "node-2", node, point)
    pid = place.show("snapshotd", "MainPID")
    place.run(*how, timeout_s=300)
    until("another daemon", lambda: place.show("snapshotd", "MainPID") not in (pid, "0"), 300)
    until("the daemon to serve", lambda: place.show("snapshotd", "ActiveState") == "active", 300)
    place.run("sh", "-c", "rm -f /run/snapshotd/fault* /run/snapshotd/*.go")
    installed.await_driver(driver)
    installed.await_steps(out)  # undone or finished: it runs, on one of the two nodes
    until("the rank to be known", lambda: installed.node_of(job) != "")
    there = "node-1" if installed.node_of(job) == "node-2" else "node-2"
    installed.move(job, there)
    installed.await_steps(out)
    installed.end_job(job)


def test_ranks_go_on_while_the_service_is_stopped(installed: SystemdCluster) -> None:
    out = installed.start_job("stopped")
    installed.move("stopped", "node-2")
    for name in ("node-1", "node-2"):
        installed.nodes[name].run("systemctl", "stop", "snapshotd", timeout_s=300)
    installed.await_witness("stopped")
    for name in ("node-1", "node-2"):
        installed.nodes[name].run("systemctl", "start", "snapshotd", timeout_s=300)
    installed.await_known("stopped", "node-2")
    installed.await_steps(out)
    installed.move("stopped", "node-1")
    installed.end_job("stopped")


def test_a_target_that_loses_power_in_the_middle_of_a_move_leaves_the_rank_on_its_source(
    installed: SystemdCluster,
) -> None:
    out = installed.start_job("kept")
    driver = installed.stopped_at("kept", "node-2", "node-2", "restored")
    installed.nodes["node-2"].lose_power()
    installed.nodes["node-2"].boot()
    installed.await_driver(driver)
    installed.await_steps(out)
    until("the rank to be known", lambda: installed.node_of("kept") == "node-1")
    installed.move("kept", "node-2")
    installed.await_steps(out)
    installed.end_job("kept")


def test_a_source_that_loses_power_hands_the_rank_to_the_target_that_has_it_whole(installed: SystemdCluster) -> None:
    """The rank's keeper and the driver are on a third node. The copy on the target waits for the source's decision."""
    out = installed.start_job("handed")
    installed.move("handed", "node-2")
    installed.await_steps(out)
    driver = installed.stopped_at("handed", "spare-1", "spare-1", "restore")
    installed.nodes["node-2"].lose_power()
    installed.nodes["spare-1"].run("touch", "/run/snapshotd/restore.go")
    installed.nodes["node-2"].boot()
    installed.await_driver(driver)
    until("the rank on the target", lambda: installed.node_of("handed") == "spare-1", 300)
    installed.await_steps(out)
    installed.move("handed", "node-1")
    installed.end_job("handed")


def test_a_node_that_reboots_beside_a_move_changes_nothing(installed: SystemdCluster) -> None:
    """It knows the rank from an earlier move, and has nothing of it any more."""
    out = installed.start_job("beside")
    installed.move("beside", "spare-1")
    installed.move("beside", "node-1")
    driver = installed.stopped_at("beside", "node-2", "node-2", "restored")
    installed.nodes["spare-1"].shut_down()
    installed.nodes["spare-1"].boot()
    installed.nodes["node-2"].run("touch", "/run/snapshotd/restored.go")
    installed.await_driver(driver)
    installed.await_steps(out)
    assert installed.node_of("beside") == "node-2"
    installed.move("beside", "spare-1")
    installed.await_steps(out)
    installed.end_job("beside")
