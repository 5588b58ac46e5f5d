"""A dump that is given up at any moment leaves the processes as they were: criu ends by itself, and is not killed.

With real criu, outside a lab, so that there are many moments. Criu that was killed while it had its code in a process
killed that process too, in one of twenty rounds: a sample should find that every other time, `--whole` nearly always.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.harness import until
from snapshotd.criu.find import find_criu
from snapshotd.moves.source import image_fifos
from snapshotd.proc import cgroup
from snapshotd.proc.cgroup import Cgroup
from tests.sampling import Sampler

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

ROUNDS, KEPT = 80, 16
#: How long criu needs for all of the dump but the pages, which do not fit into the pipe.
LONGEST_S = 0.15
_JOB = """
import threading, time
def work():
    while True:
        time.sleep(0.01)
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
ballast = bytearray(b"x" * (32 << 20))
for step in range(1 << 30):
    print(step, flush=True)
    time.sleep(0.01)
"""


class Job:
    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _JOB],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.goes_on()

    def goes_on(self) -> None:
        before = self.out.stat().st_size
        until("a step", lambda: self.process.poll() is not None or self.out.stat().st_size > before, 60)
        assert self.process.poll() is None, f"the job ended with {self.process.returncode}"


@pytest.fixture
def group() -> Iterator[Cgroup]:
    made = Cgroup(cgroup.for_guests() / f"criu-given-up-{os.getpid()}").create()
    yield made
    made.kill(10)
    made.remove()


def test_dump_that_is_given_up_leaves_the_rank_alive(tmp_path: Path, group: Cgroup, sampled: Sampler) -> None:
    job = Job(tmp_path)
    try:
        chance, running = random.Random(1), []
        for moment_s in sampled([chance.uniform(0, LONGEST_S) for _ in range(ROUNDS)], KEPT):
            running.append(_given_up(job, group, tmp_path / "images", moment_s))
            job.goes_on()
        assert sum(running) >= len(running) / 2, "criu had ended too often before the dump was given up"
    finally:
        job.process.kill()
        job.process.wait()


def _given_up(job: Job, group: Cgroup, images: Path, moment_s: float) -> bool:
    """Whether criu was at work when the dump was given up."""
    with ExitStack() as opened:
        fifos = image_fifos.make(images, [job.process.pid], opened)
        os.kill(job.process.pid, signal.SIGSTOP)
        asked = ["-t", str(job.process.pid), "-D", str(images), "-o", "dump.log", "--network-lock", "skip"]
        command = [find_criu(None)[0], "dump", *asked, "--leave-stopped"]
        enter = f'echo $$ > {group.path}/cgroup.procs; exec "$@"'
        with (images / "said").open("wb") as said:
            criu = subprocess.Popen(["sh", "-c", enter, "criu", *command], stdout=said, stderr=said)
        try:
            time.sleep(moment_s)
            runs = criu.poll() is None
            began = time.monotonic()
            image_fifos.end_criu(group, images, fifos.values())
            assert time.monotonic() - began < image_fifos.FAIL_S, (images / "dump.log").read_text()[-2000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                criu.kill()
            criu.wait()
        os.kill(job.process.pid, signal.SIGCONT)
    return runs
