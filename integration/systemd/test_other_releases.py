"""The quick start on nodes of another distribution than this machine's, up to a rank that moves there and back.

With --whole only: each boots three nodes of its own, and the first time its root file system is made from its registry.
"""

from __future__ import annotations

import shutil

import pytest

from integration.harness import WORK
from integration.systemd.cluster import SystemdCluster
from integration.systemd.conftest import ADDRESSES, package_under_test
from integration.systemd.document import commands
from integration.systemd.nodes import booted
from integration.systemd.root_image import RELEASES, lacking, root_image

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("name", RELEASES)
def test_the_quick_start_works_on(request: pytest.FixtureRequest, name: str) -> None:
    release = RELEASES[name]
    if not request.config.getoption("--whole"):
        pytest.skip("another three nodes: make test-all")
    if reason := lacking():
        pytest.skip(reason)
    if not release.registry:
        pytest.skip(f"SNAPSHOT_REGISTRY_{name.partition('-')[0].upper()} names no registry")
    if not release.keyring.exists():
        pytest.skip(f"{release.keyring} is missing: it has the keys of the registry of {name}")
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    with booted(folder, root_image(release), ADDRESSES) as nodes:
        cluster = SystemdCluster(nodes, package_under_test())
        cluster.install()
        nodes["node-1"].session(commands("look"))
        out = cluster.start_job("elsewhere")
        cluster.move("elsewhere", "node-2")
        cluster.await_steps(out)
        nodes["node-2"].run("systemctl", "restart", "snapshotd", timeout_s=300)
        cluster.await_known("elsewhere", "node-2")
        cluster.move("elsewhere", "node-1")
        cluster.await_steps(out)
        cluster.end_job("elsewhere")
