"""The nodes of a lab share one GPU here. They send device memory, as two machines do, instead of handing it over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.configuring import configured
from integration.harness import Cluster


@pytest.fixture(scope="package", autouse=True)
def device_memory_is_sent(plain_lab: Cluster) -> Iterator[None]:
    with configured(plain_lab, plain_lab.lab.nodes, {"hand_over_device_memory": False}):
        yield
