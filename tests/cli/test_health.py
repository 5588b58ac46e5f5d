"""What `migrator health` shows of nodes, and what it clears."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Refused, Unreachable, Usage
from tests.cli.conftest import FakeCluster, Migrator


@pytest.fixture
def sick(cluster: FakeCluster) -> FakeCluster:
    cluster["node-1"].health = pb.Health(
        epoch="e",
        sequence=7,
        alarms=[
            pb.Alarm(check="host-clock", subject="host", severity=pb.WARNING, text="it jumped", since_unix_s=1e9),
            pb.Alarm(
                check="gpu-ecc",
                subject="gpu:GPU-1",
                severity=pb.CRITICAL,
                text="3 errors",
                remedy="replace it",
                since_unix_s=1e9,
                count=4,
            ),
        ],
        checks=[
            pb.HealthCheck(name="gpu-ecc", state=pb.HealthCheck.RUNNING),
            pb.HealthCheck(name="host-edac", state=pb.HealthCheck.UNABLE, reason="no driver"),
        ],
    )
    return cluster


def test_alarms_are_shown_with_their_remedies_the_worst_first(sick: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("health")
    assert ran.code == Refused.exit_code
    assert "node-1: 2 alarms (1 checks, 1 off or unable)" in ran.out
    assert "spare-1: no alarms" in ran.out
    assert "seen 4 times" in ran.out
    assert "remedy: replace it" in ran.out
    assert ran.out.index("gpu:GPU-1") < ran.out.index("it jumped")
    assert "no driver" not in ran.out
    assert "no driver" in migrator("health", "node-1", "--all").out


def test_json_has_everything(sick: FakeCluster, migrator: Migrator) -> None:
    (node,) = migrator("health", "node-1", "--json").json["nodes"]
    assert (node["name"], node["epoch"], node["sequence"]) == ("node-1", "e", 7)
    assert [(alarm["check"], alarm["severity"]) for alarm in node["alarms"]] == [
        ("host-clock", "warning"),
        ("gpu-ecc", "critical"),
    ]
    assert node["checks"][1] == {"name": "host-edac", "state": "unable", "reason": "no driver"}


def test_a_healthy_node_exits_with_zero(sick: FakeCluster, migrator: Migrator) -> None:
    assert migrator("health", "node-2").code == 0
    assert migrator("health", "nowhere").code == NotFound.exit_code


def test_alarms_are_cleared_by_check_or_all_of_them(sick: FakeCluster, migrator: Migrator) -> None:
    assert migrator("health", "--clear", "gpu-ecc").code == Usage.exit_code, "on which node?"
    ran = migrator("health", "--clear", "gpu-ecc", "node-1")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "node-1: 1 alarms cleared")
    assert [alarm.check for alarm in sick["node-1"].health.alarms] == ["host-clock"]
    assert migrator("health", "--clear", "all", "node-1", "--json").json["nodes"][0]["cleared"][0]["subject"] == "host"
    requests = [request for method, request in sick["node-1"].asked if method == "ClearAlarms"]
    assert [(request.check, request.all) for request in requests] == [("gpu-ecc", False), ("", True)]


def test_a_node_that_does_not_answer_is_named(sick: FakeCluster, migrator: Migrator) -> None:
    sick["node-2"].failures["GetHealth"] = sick["node-2"].failures["ClearAlarms"] = Unreachable("it is gone")
    ran = migrator("health")
    assert "node-2: it is gone" in ran.err
    assert migrator("health", "--clear", "all", "node-1", "node-2").code == Unreachable.exit_code
