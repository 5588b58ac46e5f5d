"""What `migrator health` shows of nodes, and what it clears."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from migrator.autopilot.model import Alarm, Severity
from migrator.autopilot.outside import Reported
from migrator.autopilot.store import Store
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Refused, Unreachable, Usage
from tests.cli.conftest import Migrator
from tests.cli.fake_daemon import FakeCluster


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


# ---------------------------------------------------------------------- on the autopilot's machine


@pytest.fixture
def piloted(sick: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of an autopilot that has alarms of its own."""
    folder = tmp_path / "state"
    monkeypatch.setenv("MIGRATOR_STATE", str(folder))

    async def fill() -> None:
        async with Store.open(folder) as store:
            now = store.now()
            away = Alarm("node-2", "daemon-unreachable", "host", Severity.CRITICAL, "it is away", now - 9, now)
            await store.set_own_alarm("node-2", away)
            jobs = [
                Alarm("node-1", "job-stall", "rank:train-0", Severity.WARNING, "it stands", now - 700, now),
                Alarm("node-1", "job-straggler", "rank:old-0", Severity.WARNING, "long ago", now - 900, now - 900),
            ]
            await store.set_job_alarms(jobs)
            text = "hot\x1b[2J"
            await store.take_signals(
                [Reported("node-1", "alert 1", True, "webhook-Hot", "host", Severity.NOTICE, text, "see https://r")],
                "am",
            )

    asyncio.run(fill())
    return folder


def test_alarms_of_the_autopilot_are_shown_with_those_of_the_nodes(
    sick: FakeCluster, piloted: Path, migrator: Migrator
) -> None:
    sick["node-2"].failures["GetHealth"] = Unreachable("it is gone")
    ran = migrator("health")
    assert ran.code == Refused.exit_code
    assert "node-1: 4 alarms (1 checks" in ran.out
    assert "rank:train-0: it stands (since " in ran.out
    assert ", by the autopilot)" in ran.out
    assert "long ago" not in ran.out, "the autopilot would have renewed it"
    assert "hot?[2J (since " in ran.out
    assert ", from outside)" in ran.out
    assert "node-2: 1 alarms; its daemon does not answer" in ran.out
    assert "node-2: it is gone" in ran.err
    found = migrator("health", "--json").json["autopilot_alarms"]
    assert [(one["node"], one["source"], one["check"]) for one in found] == [
        ("node-1", "webhook", "webhook-Hot"),
        ("node-1", "jobs", "job-stall"),
        ("node-2", "autopilot", "daemon-unreachable"),
    ]
    assert migrator("health", "spare-1", "--json").json["autopilot_alarms"] == []
    assert "daemon-unreachable" in migrator("health", "node-2").out, "also if no node answers"


def test_alarms_from_outside_are_cleared_and_those_of_the_autopilot_are_not(
    sick: FakeCluster, piloted: Path, migrator: Migrator
) -> None:
    assert "node-1: 0 alarms cleared" in migrator("health", "--clear", "job-stall", "node-1").out
    ran = migrator("health", "--clear", "webhook-Hot", "node-1", "--json")
    assert [one["check"] for one in ran.json["nodes"][0]["cleared"]] == ["webhook-Hot"]
    left = migrator("health", "--json").json["autopilot_alarms"]
    assert [one["check"] for one in left] == ["job-stall", "daemon-unreachable"]


def test_state_that_is_not_here_is_not_made(sick: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    ran = migrator("health", "--state", str(tmp_path / "none"), "--json")
    assert ran.json["autopilot_alarms"] == []
    assert not os.path.exists(tmp_path / "none")
