from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from snapshotd.preflight import source
from tests.preflight.gpu_ranks import FakeShim
from tests.preflight.ranks import Child, Starter, start

__all__ = ["Starter"]


@pytest.fixture
def rank() -> Iterator[Starter]:
    """Starts processes and ends them all."""
    if os.geteuid() != 0:
        pytest.skip("preflight looks at other users' processes, as root")
    children: list[Child] = []

    def begin(code: str = "", **options: object) -> Child:
        children.append(start(code, **options))  # type: ignore[arg-type]
        return children[-1]

    yield begin
    for child in reversed(children):  # a tracer before what it traces
        child.end()


@pytest.fixture
def compiler() -> str:
    return shutil.which("cc") or pytest.skip("needs a C compiler")


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> FakeShim:
    """What every process's shim reports."""
    fake = FakeShim()
    monkeypatch.setattr(source, "shimctl", fake)
    return fake
