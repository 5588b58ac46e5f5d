"""Tests what `migrator doctor` makes of the answers of nodes: per node, and between nodes."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.doctor.compare import SKEW_FAIL_S
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Refused, Unreachable, Usage
from tests.cli.conftest import Migrator
from tests.cli.fake_daemon import FakeCluster

ALL = ("node-1", "node-2", "spare-1")


def diagnosis(**changes: Any) -> pb.DiagnoseReply:
    given: dict[str, Any] = {
        "findings": [pb.Diagnosis(check="criu", state="ok", text="CRIU 4.2.1")],
        "mtu": 9000,
        "cpu_features": ["avx2", "sse4_2"],
        "paths": [pb.PathFacts(path="/home", file_system="nfs4", source="server:/home")],
    }
    return pb.DiagnoseReply(**{**given, **changes})


@pytest.fixture
def healthy(cluster: FakeCluster) -> FakeCluster:
    for name in ALL:
        cluster[name].diagnosis = diagnosis()
    return cluster


def test_a_healthy_cluster_is_green(healthy: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("doctor")
    assert ran.code == 0
    assert ran.out.splitlines()[:-1] == [*(f"{name}: 1 checks passed" for name in ALL), "between nodes: ok"]
    assert ran.out.splitlines()[-1].startswith("3 nodes in ")
    assert "CRIU 4.2.1" in migrator("doctor", "--all").out
    report = migrator("doctor", "--json").json
    assert (report["failed"], report["warnings"], report["between"]) == (0, 0, [])
    assert report["nodes"][0]["findings"] == [{"check": "criu", "state": "ok", "text": "CRIU 4.2.1", "remedy": ""}]


def test_nodes_and_paths_are_passed_on(healthy: FakeCluster, migrator: Migrator) -> None:
    assert migrator("doctor", "node-1", "spare-1", "--path", "/data/").code == 0
    assert healthy["node-2"].called("Diagnose") == []
    (request,) = [request for method, request in healthy["node-1"].asked if method == "Diagnose"]
    assert list(request.paths) == ["/data"]
    assert migrator("doctor", "nowhere").code == NotFound.exit_code
    assert migrator("doctor", "--path", "data").code == Usage.exit_code


def test_a_failure_on_a_node_is_shown_with_its_remedy(healthy: FakeCluster, migrator: Migrator) -> None:
    broken = pb.Diagnosis(check="images", state="failed", text="too small", remedy="make it larger")
    healthy["node-2"].diagnosis = diagnosis(findings=[broken])
    ran = migrator("doctor")
    assert ran.code == Refused.exit_code
    assert "too small" in ran.out
    assert "remedy: make it larger" in ran.out
    assert "1 failures, 0 warnings" in ran.out


def test_a_silent_node_and_an_old_one_are_failures_of_their_own(healthy: FakeCluster, migrator: Migrator) -> None:
    healthy["node-1"].failures["GetNode"] = Unreachable("no answer", remedy="start it")
    healthy["node-2"].unknown.add("Diagnose")
    report = migrator("doctor", "--json")
    assert report.code == Refused.exit_code
    found = {node["name"]: node["findings"][0] for node in report.json["nodes"]}
    assert (found["node-1"]["check"], found["node-1"]["remedy"]) == ("daemon", "start it")
    assert "too old for a diagnosis" in found["node-2"]["text"]
    assert found["spare-1"]["state"] == "ok"


DIFFERENCES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "mtu": ({"mtu": 1500}, "mtu", "warning", "9000 on node-1, spare-1; 1500 on node-2"),
    "fewer cpu features": (
        {"cpu_features": ["sse4_2"]},
        "cpu-features",
        "failed",
        "ranks of node-1, spare-1 cannot move to node-2, which lack avx2",
    ),
    "missing path": ({"paths": [pb.PathFacts(path="/home")]}, "paths", "failed", "/home does not exist on node-2"),
    "silent path": (
        {"paths": [pb.PathFacts(path="/home", file_system="?")]},
        "paths",
        "failed",
        "the file system of /home does not answer on node-2",
    ),
    "other file system": (
        {"paths": [pb.PathFacts(path="/home", file_system="ext4", source="/dev/sda1")]},
        "paths",
        "warning",
        "/dev/sda1 (ext4) on node-2",
    ),
    "control port": (
        {"routes": [pb.Route(peer="node-1", control="timed out")]},
        "control-port",
        "failed",
        "node-2 → node-1: timed out",
    ),
    "data port": (
        {"routes": [pb.Route(peer="spare-1", data="No route to host")]},
        "data-port",
        "warning",
        "node-2 → spare-1: No route to host",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_each_difference_is_named(healthy: FakeCluster, migrator: Migrator, case: str) -> None:
    changes, check, state, text = DIFFERENCES[case]
    healthy["node-2"].diagnosis = diagnosis(**changes)
    ran = migrator("doctor", "--json")
    (found,) = ran.json["between"]
    assert (found["check"], found["state"]) == (check, state)
    assert text in found["text"]
    assert "node-2" in found["nodes"]
    assert found["remedy"]
    assert ran.code == (Refused.exit_code if state == "failed" else 0)


@pytest.mark.parametrize(("ahead_s", "state"), [(-30.0, "warning"), (2 * SKEW_FAIL_S, "failed")])
def test_clocks_that_differ_are_named(healthy: FakeCluster, migrator: Migrator, ahead_s: float, state: str) -> None:
    healthy["node-2"].clock_ahead_s = ahead_s
    (found,) = migrator("doctor", "--json").json["between"]
    assert (found["check"], found["state"]) == ("clock", state)
    assert "node-2" in found["nodes"]


def test_versions_that_do_not_understand_each_other_are_failures(healthy: FakeCluster, migrator: Migrator) -> None:
    healthy["node-2"].version = "99.0.0"
    (found,) = migrator("doctor", "--json").json["between"]
    assert (found["check"], found["state"]) == ("version", "warning"), "they have a common protocol"
    healthy["node-2"].protocol = pb.Protocol(newest=99, oldest=98)
    ran = migrator("doctor", "--json")
    assert [(found["check"], found["state"]) for found in ran.json["between"]] == [
        ("version", "warning"),
        ("version", "failed"),
    ]
    assert (ran.json["between"][1]["nodes"], ran.code) == (["node-2"], Refused.exit_code)
    assert "protocols 98 to 99" in ran.json["between"][1]["text"]


def test_a_node_that_all_others_cannot_reach_is_one_line(healthy: FakeCluster, migrator: Migrator) -> None:
    for name in ("node-1", "node-2"):
        healthy[name].diagnosis = diagnosis(routes=[pb.Route(peer="spare-1", control="timed out")])
    (found,) = migrator("doctor", "--json").json["between"]
    assert found["text"] == "node-1, node-2 → spare-1: timed out"
