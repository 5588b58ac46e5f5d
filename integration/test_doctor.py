"""`migrator doctor` on the nodes of a lab: in order, then with one thing broken at a time."""

from __future__ import annotations

import json
import sys
from typing import Any

from integration.harness import Cluster
from snapshotd.api.errors import Refused

FIRST, SECOND, SPARE = "node-1", "node-2", "spare-1"


def doctor(nodes: Cluster, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = nodes.migrator("doctor", "--json", "--timeout", "100", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def failures(report: dict[str, Any]) -> set[tuple[str, str]]:
    """(check, node or "between") of what has failed."""
    found = {(each["check"], "between") for each in report["between"] if each["state"] == "failed"}
    for node in report["nodes"]:
        found |= {(each["check"], node["name"]) for each in node["findings"] if each["state"] == "failed"}
    return found


def between(report: dict[str, Any], check: str) -> list[str]:
    return [each["text"] for each in report["between"] if each["check"] == check]


def test_a_lab_is_in_order(nodes: Cluster) -> None:
    status, report = doctor(nodes)
    assert failures(report) == set(), report
    assert status == 0
    assert [each["text"] for each in report["between"] if each["check"].endswith("port")] == []
    for node in report["nodes"]:
        checks = {each["check"]: each["state"] for each in node["findings"]}
        assert {"criu", "shim", "certificates", "images", "cgroup", "kernel", "time-namespace", "memory"} <= set(checks)


def test_a_daemon_that_is_down_is_named_by_itself_and_by_its_peers(nodes: Cluster) -> None:
    nodes.lab.kill_daemon(SPARE)
    status, report = doctor(nodes)
    assert status == Refused.exit_code
    assert ("daemon", SPARE) in failures(report)
    assert {text.partition(" → ")[0] for text in between(report, "control-port")} == {f"{FIRST}, {SECOND}"}
    assert all(f"→ {SPARE}: " in text for text in between(report, "control-port"))


def test_a_link_that_is_cut_is_named_for_both_nodes(nodes: Cluster) -> None:
    nodes.lab.partition(FIRST, SECOND)
    _, report = doctor(nodes)
    found = between(report, "control-port")
    assert {text.partition(":")[0] for text in found} == {f"{FIRST} → {SECOND}", f"{SECOND} → {FIRST}"}


def test_a_firewall_in_front_of_data_ports_is_a_warning(nodes: Cluster) -> None:
    rule = "iifname != lo tcp flags & (syn | ack) == syn tcp dport != 7070 reject with tcp reset"
    filtered(nodes, f"table inet fence {{\n chain in {{\n type filter hook input priority 0;\n {rule}\n }}\n}}\n")
    try:
        _, report = doctor(nodes)
    finally:
        filtered(nodes, "delete table inet fence")
    assert failures(report) == set(), report
    (text,) = between(report, "data-port")
    assert text == f"{FIRST}, {SPARE} → {SECOND}: Connection refused"


def filtered(nodes: Cluster, commands: str) -> None:
    script = f"from snapshotd.net import nft; nft.apply({commands!r})"
    assert nodes.lab.spawn(SECOND, [sys.executable, "-c", script]).wait(60) == 0


def test_a_path_that_one_node_lacks_is_named(nodes: Cluster) -> None:
    """/run of each node is its own."""
    place = nodes.run_dir(FIRST).parent / "job-files"
    place.mkdir()
    try:
        _, report = doctor(nodes, "--path", "/run/job-files")
    finally:
        place.rmdir()
    missing = [each["text"] for each in report["between"] if each["state"] == "failed"]
    assert missing == [f"/run/job-files does not exist on {SECOND}, {SPARE}"]
