"""The Debian package on nodes that boot a real systemd, as it is after its installation."""

from __future__ import annotations

import json
import re

import pytest

from integration.harness import until
from integration.systemd.cluster import SystemdCluster

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_package_brings_programs_manual_pages_users_and_folders(installed: SystemdCluster) -> None:
    for node in installed.nodes.values():
        for program in ("snapshotd", "migrator"):
            assert re.search(r"\(commit [0-9a-f]{12}, built \d{4}-\d\d-\d\d\)", node.run(program, "--version"))
        for page in ("man1/migrator.1.gz", "man8/snapshotd.8.gz", "man5/snapshotd.toml.5.gz"):
            assert (node.root / "usr/share/man" / page).exists()
        assert node.run("id", "--user", "snapshotd").strip() != "0"
        assert "snapshotd-operators" in node.run("getent", "group", "snapshotd-operators")
        modes = node.run(
            "stat", "--format=%a %U %n", "/etc/snapshotd/tls", "/var/lib/snapshotd", "/run/snapshotd/images"
        )
        assert modes.splitlines() == [
            "700 root /etc/snapshotd/tls",
            "700 root /var/lib/snapshotd",
            "700 root /run/snapshotd/images",
        ]
        assert node.run("findmnt", "--noheadings", "--output=FSTYPE", "/run/snapshotd/images").strip() == "tmpfs"


def test_the_service_reports_ready_and_keeps_its_watchdog(installed: SystemdCluster) -> None:
    for name, node in installed.nodes.items():
        assert node.show("snapshotd", "ActiveState") == "active"
        assert f"node {name}" in node.show("snapshotd", "StatusText")
        assert node.show("snapshotd", "WatchdogUSec") == "30s"
        assert node.show("snapshotd", "NRestarts") == "0", node.journal()
    node = installed.nodes["node-1"]
    pinged = node.show("snapshotd", "WatchdogTimestampMonotonic")
    until("the next ping of the watchdog", lambda: node.show("snapshotd", "WatchdogTimestampMonotonic") != pinged)


def test_the_network_process_runs_as_its_own_user(installed: SystemdCluster) -> None:
    for node in installed.nodes.values():
        shown = node.run("ps", "--no-headers", "-o", "args", "-u", "snapshotd")
        assert "snapshotd.network.process" in shown


def test_the_doctor_finds_nothing_that_would_make_a_move_fail(installed: SystemdCluster) -> None:
    done = installed.migrator("doctor", "--json", "--timeout", "100")
    report = json.loads(done.stdout)
    assert report["failed"] == 0, report
    assert done.returncode == 0
    assert [each for each in report["between"] if each["check"] in ("control-port", "data-port")] == []
    installed.nodes["node-2"].run("systemctl", "stop", "snapshotd", timeout_s=300)
    try:
        done = installed.migrator("doctor", "--json", "--timeout", "100")
    finally:
        installed.nodes["node-2"].run("systemctl", "start", "snapshotd", timeout_s=300)
    assert done.returncode != 0
    assert [each["text"] for each in json.loads(done.stdout)["between"] if each["check"] == "control-port"]


def test_systemd_finds_no_mistake_in_the_installed_unit(installed: SystemdCluster) -> None:
    verified = installed.nodes["node-1"].ask("systemd-analyze", "verify", "/usr/lib/systemd/system/snapshotd.service")
    assert verified.returncode == 0
    assert verified.stderr == ""
