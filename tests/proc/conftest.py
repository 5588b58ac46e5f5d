from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.proc import foreign_memory


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[foreign_memory._Children]:
    own = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", own)
    yield own
    own.close()
