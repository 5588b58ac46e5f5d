from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shim.build import LIB, make_shim
from tests.shim.jobs import PROGRAMS, Job, Work, compile_c


@pytest.fixture(scope="session")
def library() -> Path:
    make_shim("all")
    return LIB / "libsnapshim.so"


@pytest.fixture(scope="session")
def offload_library(library: Path) -> Path:
    """The one that backs device memory."""
    return library.with_name("libsnapshim-offload.so")


@pytest.fixture(scope="session")
def shared_library(library: Path) -> Path:
    """The variant that also moves what processes share of it."""
    return library.with_name("libsnapshim-shared.so")


@pytest.fixture(scope="session")
def work_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(PROGRAMS / "work.c", tmp_path_factory.mktemp("work") / "work", "-pthread")


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """A list of jobs that are ended after the test."""
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


@pytest.fixture
def start(library: Path, jobs: list[Job]) -> Callable[..., Job]:
    def start(*argv: str | Path) -> Job:
        jobs.append(Job(library, *argv))
        return jobs[-1]

    return start


@pytest.fixture
def work(library: Path, work_program: Path, tmp_path: Path, jobs: list[Job]) -> Callable[..., Work]:
    def work(*kinds: str, wrap: tuple[str, ...] = ()) -> Work:
        job = Work(library, work_program, tmp_path, *kinds, wrap=wrap)
        jobs.append(job)
        return job

    return work
