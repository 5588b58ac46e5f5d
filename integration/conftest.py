"""The labs of the suite. Each test process (pytest-xdist worker) has its own, brought up when a test first asks for one.

Three labs serve all files, because bringing one up takes seconds. Every fixture for one test leaves its lab tidy: jobs
ended, daemons running, links healed, no fault armed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.connections import Endpoints
from integration.drill import Drill
from integration.gpu_nodes import GpuCluster
from integration.harness import Cluster, cluster
from integration.torch_jobs import HOMES

#: Ends a test that hangs. Tests under the real GPU set their own.
HANGS_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(HANGS_S))


@pytest.fixture(scope="session")
def plain_lab() -> Iterator[Cluster]:
    """Two nodes and a spare."""
    with cluster("plain") as made:
        yield made


@pytest.fixture(scope="session")
def wide_lab() -> Iterator[Cluster]:
    """Four nodes and a spare."""
    with cluster("wide", (*HOMES, "spare-1")) as made:
        yield made


@pytest.fixture(scope="session")
def fake_gpu_lab() -> Iterator[GpuCluster]:
    """Two nodes and a spare, each with a fake GPU."""
    with cluster("gpus") as made:
        yield GpuCluster(made, made.folder / "nodes")


@pytest.fixture(scope="module")
def fake_gpu_files_lab(fake_gpu_lab: GpuCluster) -> Iterator[GpuCluster]:
    """The same, whose device memory goes through files in the memory of the host."""
    with configured(fake_gpu_lab.cluster, fake_gpu_lab.lab.nodes, {"hold_device_memory": False}):
        yield fake_gpu_lab


@pytest.fixture
def nodes(plain_lab: Cluster) -> Iterator[Cluster]:
    yield plain_lab
    plain_lab.tidy()


@pytest.fixture
def wide(wide_lab: Cluster) -> Iterator[Cluster]:
    yield wide_lab
    wide_lab.tidy()


@pytest.fixture
def lab(fake_gpu_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield fake_gpu_lab
    fake_gpu_lab.reset()


@pytest.fixture
def drill(nodes: Cluster) -> Iterator[Drill]:
    made = Drill(nodes)
    yield made
    made.close()


@pytest.fixture
def ends(nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Endpoints]:
    made = Endpoints(nodes, "c" + request.node.name.translate(str.maketrans("[]-_", "....")).replace(".", "")[5:40])
    yield made
    made.until.touch()
