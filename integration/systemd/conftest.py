"""Three nodes with systemd, on which apt has installed the Debian package. `make test-systemd` builds it and runs this."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import WORK
from integration.systemd.cluster import PACKAGE_FOLDER, SystemdCluster
from integration.systemd.nodes import booted
from integration.systemd.root_image import lacking, root_image

#: As in docs/quickstart.md.
ADDRESSES = {"node-1": "10.0.0.1", "node-2": "10.0.0.2", "spare-1": "10.0.0.3"}
#: The tests share the nodes, in this order; the last ones remove the package.
ORDER = (
    "test_first_move",
    "test_installed_nodes",
    "test_jobs",
    "test_node_faults",
    "test_peers",
    "test_ssh",
    "test_hybrid_node",
    "test_operators_machine",
    "test_rpm",
    "test_broken_setups",
    "test_bad_input",
    "test_upgrade",
    "test_removal",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In their own lane only: they need a built package, more programs than `make setup` installs, and minutes."""
    if os.environ.get("SNAPSHOT_LANE") == "systemd":
        items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER))
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="nodes with systemd are a lane of their own: make test-systemd"))


def package_under_test(name: str = "snapshotd") -> Path:
    packages = sorted(Path(os.environ[PACKAGE_FOLDER]).glob(f"{name}_*.deb"))
    assert len(packages) == 1, f"${PACKAGE_FOLDER} must name a folder with one {name}_*.deb: {packages}"
    return packages[0]


@pytest.fixture(scope="session")
def installed() -> Iterator[SystemdCluster]:
    if reason := lacking():
        pytest.skip(reason)
    folder = WORK / "systemd"
    shutil.rmtree(folder, ignore_errors=True)
    with booted(folder, root_image(), ADDRESSES) as nodes:
        cluster = SystemdCluster(nodes, package_under_test())
        cluster.install()
        yield cluster
