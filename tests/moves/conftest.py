"""Nodes for the tests of carried files. Not below pytest's own folder, which other users cannot enter."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.moves.carry import Carry
from tests.moves import closed_nodes
from tests.moves.carry_places import Place
from tests.moves.closed_move import Move, made_in


@pytest.fixture
def node() -> Iterator[Place]:
    """For files that a rank has open."""
    top = Path(tempfile.mkdtemp(prefix="carry-"))
    top.chmod(0o755)
    local, images, root = top / "local", top / "images", top / "root"
    for path, mode in ((local, 0o1777), (images, 0o700), (root, 0o700)):
        path.mkdir()
        path.chmod(mode)
    yield Place(Carry(top, [str(local)]), local, images, root)
    shutil.rmtree(top)


@pytest.fixture
def nodes() -> Iterator[tuple[closed_nodes.Place, closed_nodes.Place]]:
    """For files that a rank has closed: source and target."""
    top = Path(tempfile.mkdtemp(prefix="closed-"))
    top.chmod(0o755)
    yield closed_nodes.nodes_at(top)
    shutil.rmtree(top)


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    """For the source's part of a move of closed files."""
    with made_in(tempfile.gettempdir(), monkeypatch) as made:
        yield made


@pytest.fixture
def move_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    with made_in("/dev/shm", monkeypatch) as made:
        yield made
