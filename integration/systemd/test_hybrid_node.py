"""A node with hybrid cgroups: controllers in version 1, and a hierarchy of version 2 beside them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.systemd.cluster import SystemdCluster
from integration.systemd.document import commands
from integration.systemd.nodes import Node
from integration.systemd.root_image import root_image

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

NAME, ADDRESS = "old-1", "10.0.0.4"


@pytest.fixture
def hybrid(installed: SystemdCluster) -> Iterator[Node]:
    if not Path("/sys/fs/cgroup/unified/cgroup.procs").exists():
        pytest.skip("nspawn gives a node the cgroups of the machine, and this one has version 2 alone")
    with installed.further_node(NAME, ADDRESS, root_image(), hybrid=True) as node:
        shutil.copy(installed.package, node.root / "root")
        node.session(commands("install"))
        yield node


def test_ranks_move_to_and_from_a_node_with_hybrid_cgroups(installed: SystemdCluster, hybrid: Node) -> None:
    mounts = hybrid.run("findmnt", "--noheadings", "--list", "--output=TARGET,FSTYPE")
    assert ["/sys/fs/cgroup/unified", "cgroup2"] in [line.split() for line in mounts.splitlines()], mounts
    with installed.joined(NAME, hybrid):
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
