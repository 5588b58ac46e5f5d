"""One lab for the whole suite; each test leaves it tidy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.drill import Drill
from integration.harness import Cluster, cluster


@pytest.fixture(scope="session")
def lab_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Not in /tmp: every node has its own.
    folder = Path(__file__).parent / ".work"
    folder.mkdir(exist_ok=True)
    with cluster(folder, "suite") as made:
        yield made


@pytest.fixture
def nodes(lab_cluster: Cluster) -> Iterator[Cluster]:
    yield lab_cluster
    lab_cluster.tidy()


@pytest.fixture(scope="session")
def behave() -> Iterator[Cluster]:
    """A lab of its own for what a launcher sees: its daemons and keepers are killed as well."""
    folder = Path(__file__).parent / ".work" / "behave"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "behave") as made:
        yield made


@pytest.fixture(scope="session")
def fault_cluster() -> Iterator[Cluster]:
    """A lab of its own for what is killed on purpose: nothing of it can disturb the other tests."""
    folder = Path(__file__).parent / ".work" / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "faults") as made:
        yield made


@pytest.fixture
def drill(fault_cluster: Cluster) -> Iterator[Drill]:
    made = Drill(fault_cluster)
    yield made
    made.close()
    fault_cluster.tidy()
