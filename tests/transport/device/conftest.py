"""Both ends, with and without encryption; and nothing is left of either."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.device.lane import Ends, children


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert children() == []
    for thread in threading.enumerate():
        if "waitpid" in thread.name:  # asyncio's, one per child: it ends a moment after it has told
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(params=["encrypted", "plain"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, nothing_left: None) -> Ends:
    return Ends(tmp_path, encrypted=request.param == "encrypted")


@pytest.fixture
def plain(tmp_path: Path, nothing_left: None) -> Ends:
    return Ends(tmp_path, encrypted=False)


@pytest.fixture
def encrypted(tmp_path: Path, nothing_left: None) -> Ends:
    return Ends(tmp_path, encrypted=True)
