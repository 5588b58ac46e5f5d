"""Certificates and the CA of running daemons are replaced while a rank runs; then it moves, and the old CA counts no more.

`ssh` is a stand-in that enters the namespaces of a node and runs there what it was given, as the user root. All else is real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import MIGRATOR, PATIENCE_S, Cluster, Job
from integration.test_refusals import cluster_with
from migrator import ca_rotation, pki
from snapshotd.api.errors import Refused, Unreachable

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[1]


def daemon(nodes: Cluster, node: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-P",
        "-m",
        "snapshotd.main",
        "--config",
        str(nodes.lab.layout.node(node) / "snapshotd.toml"),
    )


def programs(nodes: Cluster) -> Path:
    """Stand-ins for ssh and for the installed `snapshotd`, which uses the configuration of the node where it runs."""
    folder = nodes.folder / "bin"
    folder.mkdir(exist_ok=True)
    configuration = f"{nodes.lab.layout.run}/$(uname -n)/snapshotd.toml"
    record = nodes.lab.layout.load()
    assert record is not None
    holders = " ".join(f"{name}) pid={holder.pid};;" for name, holder in record.holders.items())
    scripts = {
        "ssh": f'[ "$1" = -- ] || exit 9; case $2 in {holders} *) exit 255;; esac\n'
        'exec nsenter --target $pid --mount --net --uts -- sh -c "$3"',
        "snapshotd": f'exec {sys.executable} -m snapshotd.main --config "{configuration}" "$@"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def cluster_verb(nodes: Cluster, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = nodes.environment(MIGRATOR_PKI=str(nodes.lab.layout.run / "pki"))
    if path is not None:
        environment["PATH"] = f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        [*MIGRATOR, "cluster", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )


def done(asked: subprocess.CompletedProcess[str], nodes: Cluster) -> str:
    assert asked.returncode == 0, f"{asked.stdout}{asked.stderr}\n{nodes.logs()}"
    return asked.stdout


def served_by(nodes: Cluster, job: Job, old: pki.Identity) -> subprocess.CompletedProcess[str]:
    """`migrator ps` with an operator's former certificate."""
    return subprocess.run(
        [*MIGRATOR, "ps"], cwd=ROOT, env=cluster_with(nodes, old), capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.timeout(1200)
def test_certificates_and_ca_of_running_daemons_are_replaced(nodes: Cluster, tmp_path: Path) -> None:
    lab, folder = nodes.lab, nodes.folder
    job = nodes.workload("node-1", "chain.py")
    job.await_lines(3)
    daemons = {name: lab.daemon_pid(name) for name in lab.nodes}
    old = pki.Identity(*(tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key")))
    for path in (old.ca, old.cert, old.key):
        shutil.copy(lab.layout.operator / path.name, path)

    # The certificate of the target alone, with a file that is copied by hand.
    before = (lab.layout.node("spare-1") / "tls.crt").read_bytes()
    done(cluster_verb(nodes, "rotate", "spare-1", "--output", str(folder)), nodes)
    assert lab.exec("spare-1", [*daemon(nodes, "spare-1"), "join", str(folder / "spare-1.join")]) == 0
    assert (lab.layout.node("spare-1") / "tls.crt").read_bytes() != before
    (folder / "spare-1.join").unlink()
    nodes.move(job, "spare-1")
    job.await_progress()

    # A node with a rank is not removed. The CA: all three stages, each after the nodes have shown that they are ready.
    refused = cluster_verb(nodes, "remove", "spare-1")
    assert (refused.returncode, "1 ranks run on spare-1" in refused.stderr) == (Refused.exit_code, True), refused.stderr
    authority = (lab.layout.run / "pki/ca.crt").read_bytes()
    assert served_by(nodes, job, old).returncode == 0, "the old certificate is good until its CA is dropped"
    done(cluster_verb(nodes, "rotate", "--ca", "--ssh", "--output", str(folder), path=programs(nodes)), nodes)
    assert ca_rotation.stage(lab.layout.run / "pki") == "stable"
    for name in lab.nodes:
        present = (lab.layout.node(name) / "ca.crt").read_bytes()
        assert present.count(b"BEGIN CERTIFICATE") == 1
        assert authority.strip() not in present

    job.await_progress()
    nodes.move(job, "node-2")
    job.await_progress()
    assert {name: lab.daemon_pid(name) for name in lab.nodes} == daemons

    # The caller trusts the new CA, so it is the daemons that refuse its certificate of the old one.
    asked = served_by(nodes, job, pki.Identity(lab.layout.operator / "ca.crt", old.cert, old.key))
    assert asked.returncode == Unreachable.exit_code, asked.stdout + asked.stderr
    assert "certificate" in asked.stderr
