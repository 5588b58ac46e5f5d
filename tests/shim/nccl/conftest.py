"""Builds the shim and the stand-in for NCCL, and runs ranks with the shim preloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes import nccl_build
from tests.shim.build import LIB, make_shim
from tests.shim.nccl.gates import Gates

REPOSITORY = Path(__file__).resolve().parents[3]
STAND_IN = REPOSITORY / "tests" / "fakes" / "nccl"


def build(folder: Path, version: int = nccl_build.CURRENT) -> Path:
    """A folder with libsnapshim.so and the stand-in's libnccl.so.2."""
    make_shim("all")
    made = nccl_build.build(version)
    for library in (LIB / "libsnapshim.so", made / "libnccl.so.2", made / "libfakestreams.so.1"):
        (folder / library.name).symlink_to(library)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim-nccl"))


@pytest.fixture(scope="session")
def built_2_18(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim-nccl-2.18"), version=nccl_build.OLD)


class Job:
    """The ranks of one test. Those that still run at its end are killed."""

    def __init__(self, built: Path, meeting: Path) -> None:
        self.built = built
        self.meeting = meeting
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, scenario: str, nranks: int, *, before: Sequence[str] = (), **environment: str) -> None:
        program = [sys.executable, "-m", "tests.shim.nccl.rank", str(self.built / "libnccl.so.2"), str(self.meeting)]
        preload = {"LD_PRELOAD": str(self.built / "libsnapshim.so"), "FAKE_NCCL_ADDR": "127.0.0.1"}
        for rank in range(nranks):
            with (self.meeting / f"output-{rank}").open("w") as output:
                process = subprocess.Popen(
                    [*before, *program, scenario, str(rank), str(nranks)],
                    cwd=REPOSITORY,
                    env={**os.environ, **preload, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.meeting.glob("output-*")))

    def gates(self) -> Gates:
        return Gates(process.pid for process in self.processes)

    def step(self, rank: int) -> int:
        try:
            return int((self.meeting / f"step-{rank}").read_text() or 0)
        except FileNotFoundError:
            return 0

    def reach(self, step: int) -> None:
        """Waits until every rank has done that many steps."""
        while min(self.step(rank) for rank in range(len(self.processes))) < step:
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.002)

    def steps(self) -> list[int]:
        return [self.step(rank) for rank in range(len(self.processes))]

    def stop(self) -> None:
        (self.meeting / "stop").touch()
        self.all_right()

    def all_right(self) -> None:
        """Waits until all ranks have exited without an error. If one fails, the others may hang and are killed."""
        while None in (ends := [process.poll() for process in self.processes]):  # all are asked: any may have failed
            if any(ends):
                self.kill()
            time.sleep(0.005)
        assert [process.returncode for process in self.processes] == [0] * len(self.processes), self.output()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def job(built: Path, tmp_path: Path) -> Iterator[Job]:
    started = Job(built, tmp_path)
    yield started
    started.kill()
