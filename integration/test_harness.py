"""The suite itself: one run does not disturb the lab of another, so a failure is always the product's."""

from __future__ import annotations

import os

import pytest

from integration.harness import Cluster, cluster
from snapshotd.api.errors import Busy


def test_second_run_leaves_the_lab_of_the_first_alone(nodes: Cluster) -> None:
    job = nodes.workload("node-1", "chain.py", "--steps", "1000", "--pace-s", "0.05")
    job.await_lines(3)
    daemons = [nodes.lab.daemon_pid(node) for node in nodes.lab.nodes]
    with (
        pytest.raises(Busy, match=f"another run from this checkout, process {os.getpid()}"),
        cluster("plain"),
    ):
        pass
    assert [nodes.lab.daemon_pid(node) for node in nodes.lab.nodes] == daemons
    job.await_progress(3)
