"""Both nodes of a device-memory channel, encrypted and plain. No process may be left afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.device.channel import Nodes, children


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert children() == []
    for thread in threading.enumerate():
        if "waitpid" in thread.name:  # asyncio has one per child, which ends a moment after it has reported
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(params=["encrypted", "plain"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path, nothing_left: None) -> Nodes:
    return Nodes(tmp_path, encrypted=request.param == "encrypted")


@pytest.fixture
def plain(tmp_path: Path, nothing_left: None) -> Nodes:
    return Nodes(tmp_path, encrypted=False)


@pytest.fixture
def encrypted(tmp_path: Path, nothing_left: None) -> Nodes:
    return Nodes(tmp_path, encrypted=True)
