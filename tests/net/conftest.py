"""Fixtures of the network tests: three hosts on one switch (hosts.py), and a rank to move (ranks.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.hosts import Hosts, three_hosts
from tests.net.ranks import Rank


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """New for every test; the modules that use it are marked `root`."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    with three_hosts() as three:
        yield three


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.end()


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack
