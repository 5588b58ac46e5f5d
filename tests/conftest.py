"""For all tests. Hypothesis does not measure time: a busy machine is no reason to fail."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """A daemon collects unused objects after each move: not among the hundred thousands of objects of pytest itself."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter. Not tmp_path: every session of pytest closes the folders above it to others."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)
