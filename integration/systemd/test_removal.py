"""The Debian package is removed from nodes, with ranks running and without."""

from __future__ import annotations

import re
import subprocess

import pytest

from integration.systemd.cluster import APT, SystemdCluster, files, start_autopilot

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_ranks_go_on_and_are_named_when_the_package_is_removed(installed: SystemdCluster) -> None:
    """The autopilot runs on the node too. One rank was moved away from it, so the daemon of the other node knows it still."""
    out = installed.start_job("left-alone")
    away = installed.start_job("gone-away")
    installed.move("gone-away", "node-2")
    first = installed.nodes["node-1"]
    start_autopilot(first)

    said = first.run(*APT, "remove", "snapshotd", timeout_s=300)
    assert "the autopilot ran on this node and is stopped" in said
    assert re.search(r"these ranks run on this node or were started on it\. They go on", said)
    for job in ("left-alone", "gone-away"):
        assert any(job in line.split() for line in said.splitlines()), said
    for unit in ("snapshotd", "migrator-autopilot"):
        assert first.show(unit, "LoadState") == "not-found"
    assert "stopped by a signal" in first.journal("migrator-autopilot"), "it ended in order"
    assert (first.root / "var/lib/migrator-autopilot").is_dir(), "the event log goes with purge only"

    installed.await_steps(out)
    installed.end_job("left-alone")
    installed.await_witness("gone-away")

    # What the message says: the output that has not arrived meanwhile arrives when the daemon runs again.
    first.run(*APT, "install", f"/root/{installed.package.name}", timeout_s=600)
    first.run("systemctl", "enable", "--now", "snapshotd", timeout_s=300)
    installed.await_known("gone-away", "node-2")
    installed.await_steps(away)
    installed.end_job("gone-away")


def test_remove_keeps_the_journal_and_purge_leaves_a_clean_system(installed: SystemdCluster) -> None:
    for name, node in installed.nodes.items():
        node.run(*APT, "remove", "snapshotd", timeout_s=300)
        assert node.show("snapshotd", "LoadState") == "not-found"
        assert node.ask("findmnt", "/run/snapshotd/images").returncode != 0
        assert node.ask("ps", "-u", "snapshotd").returncode != 0, "the network process still runs"
        assert (node.root / "var/lib/snapshotd").is_dir()
        assert (node.root / "etc/snapshotd/snapshotd.toml").exists()
        assert not (node.root / "opt/snapshotd").exists()

        node.run(*APT, "purge", "snapshotd", timeout_s=300)
        # root's own files, and the files of users and groups, which Debian keeps so that their ids are not given out again.
        left = {
            path
            for path in files(node) - installed.before[name]
            if not path.startswith("root/")
            and not re.fullmatch(r"etc/\.?(passwd|group|shadow|gshadow|sub[ug]id|pwd)(-|\.lock)?", path)
        }
        assert left == set()
        assert node.ask("test", "-e", "/run/snapshotd").returncode != 0
        assert node.run("systemctl", "--failed", "--quiet", "--plain", "list-units", "*snapshotd*") == ""


def test_the_package_can_be_installed_again(installed: SystemdCluster) -> None:
    node = installed.nodes["node-2"]
    node.run("dpkg", "--purge", "snapshotd", timeout_s=300)  # whatever a test that failed has left
    node.run(*APT, "install", f"/root/{installed.package.name}", timeout_s=600)
    assert node.show("snapshotd", "LoadState") == "loaded"
    # Without a configuration the program says what is missing, and systemd is not asked to start it.
    failed: subprocess.CompletedProcess[str] = node.ask("snapshotd", "--check-config")
    assert failed.returncode != 0
    assert "/etc/snapshotd/snapshotd.toml" in failed.stderr
    node.run(*APT, "purge", "snapshotd", timeout_s=300)
