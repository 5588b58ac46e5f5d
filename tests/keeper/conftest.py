from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.keeper.nodes import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = await Node(tmp_path).start()
    yield started
    await started.clean()
