"""The RPM on a node: installed by rpm, used, upgraded over itself and erased.

The node is a Debian with the program rpm, because the registries of distributions with RPM cannot be reached everywhere. So
this shows the files and scripts of the package on a real systemd, and not its dependencies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.systemd.cluster import PACKAGE_FOLDER, SystemdCluster, files
from integration.systemd.nodes import Node
from integration.systemd.root_image import root_image

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

NAME, ADDRESS = "rpm-1", "10.0.0.5"
RPM = "rpm --nodeps --force-debian"


@pytest.fixture
def node(installed: SystemdCluster) -> Iterator[Node]:
    packages = sorted(Path(os.environ[PACKAGE_FOLDER]).glob("snapshotd-*.rpm"))
    if not packages:
        pytest.skip(f"there is no RPM in ${PACKAGE_FOLDER}: tools/package --rpm")
    with installed.further_node(NAME, ADDRESS, root_image(more=("rpm",))) as made:
        shutil.copy(packages[0], made.root / "root/snapshotd.rpm")
        yield made


def test_an_rpm_is_installed_used_and_erased(installed: SystemdCluster, node: Node) -> None:
    node.session("rpm --query --all")  # makes its database
    before = files(node)
    node.session(f"{RPM} --install snapshotd.rpm")
    assert node.show("snapshotd", "LoadState") == "loaded"
    with installed.joined(NAME, node):
        out = installed.start_job("to-rpm")
        installed.move("to-rpm", NAME)
        installed.await_steps(out)
        pid = node.show("snapshotd", "MainPID")
        node.session(f"{RPM} --upgrade --replacepkgs snapshotd.rpm")
        assert node.show("snapshotd", "ActiveState") == "active"
        assert node.show("snapshotd", "MainPID") != pid
        installed.await_known("to-rpm", NAME)
        installed.move("to-rpm", "node-1")
        installed.await_steps(out)
        installed.end_job("to-rpm")
    node.session(f"{RPM} --erase snapshotd")
    assert node.show("snapshotd", "LoadState") == "not-found"
    left = {path for path in files(node) - before if not path.startswith(("root/", "etc/", "var/lib/"))}
    assert left == set()
