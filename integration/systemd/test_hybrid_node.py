"""A node with hybrid cgroups: controllers in version 1, and a hierarchy of version 2 beside them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.systemd.cluster import USER, USER_ID, SystemdCluster
from integration.systemd.document import commands
from integration.systemd.nodes import Node
from integration.systemd.root_image import root_image

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

NAME, ADDRESS = "old-1", "10.0.0.4"


@pytest.fixture
def hybrid(installed: SystemdCluster) -> Iterator[Node]:
    if not Path("/sys/fs/cgroup/unified/cgroup.procs").exists():
        pytest.skip("nspawn gives a node the cgroups of the machine, and this one has version 2 alone")
    first = installed.nodes["node-1"]
    node = Node(NAME, ADDRESS, first.folder.with_name(NAME), first.home, first.network, hybrid=True)
    try:
        node.create(root_image())
        node.boot()
        node.run("useradd", "--uid", str(USER_ID), "--no-create-home", "--home-dir", f"/home/{USER}", USER)
        shutil.copy(installed.package, node.root / "root")
        node.session(commands("install"))
        yield node
    finally:
        node.discard()


def test_ranks_move_to_and_from_a_node_with_hybrid_cgroups(installed: SystemdCluster, hybrid: Node) -> None:
    mounts = hybrid.run("findmnt", "--noheadings", "--list", "--output=TARGET,FSTYPE")
    assert ["/sys/fs/cgroup/unified", "cgroup2"] in [line.split() for line in mounts.splitlines()], mounts
    first = installed.nodes["node-1"]
    first.session(f"migrator cluster add {NAME} {ADDRESS}")
    (first.root / f"root/{NAME}.join").rename(hybrid.root / f"root/{NAME}.join")
    hybrid.session(commands("join", NAME))
    installed.nodes[NAME] = hybrid
    try:
        out = installed.start_job("to-hybrid")
        installed.move("to-hybrid", NAME)
        installed.await_steps(out)
        hybrid.run("systemctl", "restart", "snapshotd", timeout_s=300)
        installed.await_known("to-hybrid", NAME)
        installed.move("to-hybrid", "node-2")
        installed.await_steps(out)
        installed.end_job("to-hybrid")

        out = installed.start_job("from-hybrid", NAME)
        installed.move("from-hybrid", "node-1")
        installed.await_steps(out)
        installed.move("from-hybrid", NAME)
        installed.await_steps(out)
        installed.end_job("from-hybrid", NAME)
    finally:
        del installed.nodes[NAME]
        first.session(f"migrator cluster remove {NAME} --force")
