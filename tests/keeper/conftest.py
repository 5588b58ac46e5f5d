from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.keeper.nodes import Node


@pytest.fixture
async def node(open_folder: Path) -> AsyncIterator[Node]:
    started = await Node(open_folder).start()
    yield started
    await started.clean()


@pytest.fixture
async def other(open_folder: Path) -> AsyncIterator[Node]:
    folder = open_folder / "other"
    folder.mkdir(mode=0o755)
    started = await Node(folder, "node-2").start()
    yield started
    await started.clean()
