"""`migrator cluster … --ssh` with a real ssh server on the node that joins."""

from __future__ import annotations

import pytest

from integration.systemd.cluster import SystemdCluster
from integration.systemd.document import commands
from snapshotd.api.errors import Refused

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def certificate(cluster: SystemdCluster, node: str) -> bytes:
    return (cluster.nodes[node].root / "etc/snapshotd/tls/node.crt").read_bytes()


def let_root_log_in(cluster: SystemdCluster) -> None:
    """As an administrator has prepared it: names of nodes, a key, and ssh servers that are known."""
    first = cluster.nodes["node-1"]
    first.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/root/.ssh/id_ed25519")
    hosts = "".join(f"Host {name}\n  HostName {node.address}\n" for name, node in cluster.nodes.items())
    (first.root / "root/.ssh/config").write_text(hosts)
    key = (first.root / "root/.ssh/id_ed25519.pub").read_text()
    for node in cluster.nodes.values():
        folder = node.root / "root/.ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(key)
        assert node.show("ssh", "ActiveState") == "active"
        with (first.root / "root/.ssh/known_hosts").open("a") as known:
            kind, public = (node.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
            known.write(f"{node.address} {kind} {public}\n")


def test_a_node_joins_and_gets_new_certificates_through_ssh(installed: SystemdCluster) -> None:
    let_root_log_in(installed)
    first, second = installed.nodes["node-1"], installed.nodes["node-2"]
    first.session("migrator cluster remove node-2 --force")
    second.session("systemctl disable --now snapshotd; rm -r /etc/snapshotd/snapshotd.toml /etc/snapshotd/tls/*")

    said = first.session(commands("ssh"))
    assert "node-2 has joined through ssh root@node-2, and its daemon runs" in said
    assert not (first.root / "root/node-2.join").exists(), "the key of the node is in no file"
    assert second.show("snapshotd", "ActiveState") == "active"
    assert second.run("systemctl", "is-enabled", "snapshotd").strip() == "enabled"

    # Another rank than that of other tests moves there, and its daemon takes new certificates while it runs.
    out = installed.start_job("joined")
    installed.move("joined", "node-2")
    before, pid = certificate(installed, "node-2"), second.show("snapshotd", "MainPID")
    first.session("migrator cluster rotate node-2 --ssh")
    assert certificate(installed, "node-2") != before
    installed.move("joined", "node-1")
    assert second.show("snapshotd", "MainPID") == pid
    installed.await_steps(out)
    installed.end_job("joined")


def test_a_node_that_ssh_cannot_reach_is_named_and_its_file_is_kept(installed: SystemdCluster) -> None:
    first, second = installed.nodes["node-1"], installed.nodes["node-2"]
    second.run("systemctl", "stop", "ssh")
    try:
        done = first.ask("sh", "-c", "cd /root && migrator cluster rotate node-2 --ssh")
    finally:
        second.run("systemctl", "start", "ssh")
    assert done.returncode == Refused.exit_code, done.stdout + done.stderr
    assert "ssh root@node-2 failed" in done.stderr
    assert "Connection refused" in done.stderr
    assert "node-2.join" in done.stderr
    (first.root / "root/node-2.join").rename(second.root / "root/node-2.join")
    assert "has new certificates" in second.session("snapshotd join node-2.join; rm node-2.join")
