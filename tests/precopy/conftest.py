from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.precopy.followed import Copy, Pages
from tests.shim.build import LIB, make_shim
from tests.shim.jobs import compile_c

PROGRAM = Path(__file__).parent / "programs/pages.c"


@pytest.fixture(scope="session")
def library() -> Path:
    make_shim("all")
    return LIB / "libsnapshim.so"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(PROGRAM, tmp_path_factory.mktemp("pages") / "pages", "-pthread")


@pytest.fixture
def job(library: Path, program: Path) -> Iterator[Pages]:
    started = Pages(library, program)
    yield started
    started.end()


@pytest.fixture
def follow() -> Iterator[Callable[[Pages], Copy]]:
    copies: list[Copy] = []

    def follow(job: Pages) -> Copy:
        copies.append(Copy(job))
        return copies[-1]

    yield follow
    for copy in copies:
        copy.close()
