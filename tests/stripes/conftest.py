"""Certificates of two nodes; both ends, with and without encryption; and nothing is left of either."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrator import pki
from snapshotd.api.channel import Credentials
from tests.stripes.lane import SOURCE, TARGET, Ends, children


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    pki.init(folder)
    return folder


def issue(authority: Path, node: str) -> Credentials:
    identity = pki.issue_node(authority, node)
    return Credentials(identity.ca, identity.cert, identity.key)


@pytest.fixture(scope="session")
def source(authority: Path) -> Credentials:
    return issue(authority, SOURCE)


@pytest.fixture(scope="session")
def target(authority: Path) -> Credentials:
    return issue(authority, TARGET)


@pytest.fixture(scope="session")
def stranger(authority: Path) -> Credentials:
    return issue(authority, "node-3")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert children() == []
    for thread in threading.enumerate():
        if "waitpid" in thread.name:  # asyncio's, one per child: it ends a moment after it has told
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(params=["encrypted", "plain"])
def ends(
    request: pytest.FixtureRequest, tmp_path: Path, source: Credentials, target: Credentials, nothing_left: None
) -> Ends:
    return Ends(tmp_path, source, target, encrypted=request.param == "encrypted")


@pytest.fixture
def plain(tmp_path: Path, source: Credentials, target: Credentials, nothing_left: None) -> Ends:
    return Ends(tmp_path, source, target, encrypted=False)


@pytest.fixture
def encrypted(tmp_path: Path, source: Credentials, target: Credentials, nothing_left: None) -> Ends:
    return Ends(tmp_path, source, target, encrypted=True)
