"""Large memory of a rank is sent beside criu, and is the same afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.harness import Cluster
from integration.test_moves import uninterrupted
from tests.cli import chrome_trace
from tests.kernel import needs_page_scans


@pytest.fixture
def beside_criu(nodes: Cluster) -> Iterator[Cluster]:
    with configured(nodes, ("node-1", "spare-1"), {"send_beside_criu": True}):
        yield nodes


@needs_page_scans
def test_large_memory_of_every_kind_survives_moves_there_and_back(beside_criu: Cluster, tmp_path: Path) -> None:
    nodes = beside_criu
    end = nodes.folder / "end-of-layouts"
    end.unlink(missing_ok=True)
    job = nodes.workload("node-1", "layouts.py", "--end-file", str(end))
    job.await_lines(10)
    for target in ("spare-1", "node-1"):
        moved = nodes.move(job, target, more=("--trace", str(tmp_path / f"{target}.json")))
        assert chrome_trace.read(tmp_path / f"{target}.json").named("send large memory")
        assert moved["bytes"] > 60 << 20
        job.await_progress(10)
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.text() == uninterrupted("layouts.py", "--steps", str(steps), "--pace-s", "0")
