"""What the network tests share: three hosts on one switch (see tests/net/hosts.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.net.hosts import Hosts, three_hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Fresh for every test; the modules that use it are marked `root`."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    with three_hosts() as three:
        yield three
