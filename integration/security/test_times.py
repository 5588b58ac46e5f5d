"""A node cannot upset the clock of another node's daemon by the times that it names in calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.harness import Cluster
from integration.security.clock_breaker import ATTACKS
from integration.security.test_forged_images import endpoint, run

pytestmark = pytest.mark.root


def test_a_time_that_is_no_number_is_refused_and_delays_nobody(nodes: Cluster, tmp_path: Path) -> None:
    layout = nodes.lab.layout
    settings = {"endpoint": endpoint(nodes, "node-1"), "name": "node-1"}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**settings, "node": str(layout.node("node-2")), "operator": str(layout.operator)}))
    result = run(nodes, "-m", "integration.security.clock_breaker", str(path))
    assert result["ended"] == result["waits"], result
    assert result["answers"] == {"damaged": ATTACKS}
