"""Runs moves under AddressSanitizer and ThreadSanitizer: the NCCL part, the stand-in and the job are instrumented.

The shim's other parts are left out: they run before a sanitizer is initialised, and start threads that it does not see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snapshotd.inprocess import symbols
from tests.fakes import nccl_build
from tests.shim.nccl.conftest import REPOSITORY, STAND_IN, Job
from tests.shim.nccl.gates import ATTACH, OPEN, Gates, Refused
from tests.shim.nccl.test_moves import rebuild

SHIM = REPOSITORY / "shim" / "lib"
PROGRAMS = REPOSITORY / "tests" / "shim" / "nccl" / "programs"


def compile_(sanitizer: str, *arguments: str | Path) -> None:
    flags = ("-std=c11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-pthread", "-fPIC")
    command = ["cc", *flags, "-Wall", "-Wextra", "-Werror", f"-I{STAND_IN}", f"-I{SHIM}", *arguments]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


class SanitizedJob(Job):
    def start(self, scenario: str, nranks: int, *, before: Sequence[str] = (), **environment: str) -> None:
        # With address randomisation, some kernels load the program where ThreadSanitizer needs its shadow memory.
        program = [shutil.which("setarch") or "setarch", "-R", str(self.built / scenario), str(self.meeting)]
        for rank in range(nranks):
            with (self.meeting / f"output-{rank}").open("w") as output:
                process = subprocess.Popen(
                    [*before, *program, str(rank), str(nranks)],
                    env={**os.environ, "FAKE_NCCL_ADDR": "127.0.0.1", **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)


@pytest.fixture(params=["address", "thread"])
def sanitized(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SanitizedJob]:
    folder = tmp_path / "built"
    folder.mkdir()
    made = nccl_build.build(sanitizer=request.param)
    for name in ("libnccl.so.2", "libfakestreams.so.1"):
        (folder / name).symlink_to(made / name)
    core = [SHIM / "core" / name for name in ("lockless.c", "loaded.c", "mailbox.c", "maps.c", "tasks.c")]
    sources = [*sorted((SHIM / "nccl").glob("*.c")), *core, PROGRAMS / "control.c"]
    shim = folder / "libsnapshim.so"
    compile_(request.param, "-shared", "-Wl,--build-id=sha1", "-fvisibility=hidden", "-o", shim, *sources, "-ldl")
    libraries = (shim, folder / "libnccl.so.2", folder / "libfakestreams.so.1")
    compile_(request.param, "-o", folder / "job", PROGRAMS / "job.c", *libraries, f"-Wl,-rpath,{folder}")
    symbols.builds.learn(shim)
    job = SanitizedJob(folder, tmp_path)
    yield job
    job.kill()


def cancel_an_attach(gates: Gates) -> None:
    """The last rank does not attach. The others are inside blocking calls, which another thread aborts."""
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    lines = gates.attach_lines(reports, comms)
    waiting = [(gate, gate.send(ATTACH, lines, timeout_s=3600.0)) for gate in gates.gates[:-1]]
    for gate, number in waiting:
        gate.cancel(number)
        with pytest.raises(Refused):
            gate.finish(number)
        gate.until_idle()
        assert {comm["state"] for comm in gate.report()["comms"]} == {"detached"}
    gates.attach(reports, comms)


@pytest.mark.sampled(1)
def test_sanitizer_finds_no_error_during_moves(sanitized: SanitizedJob) -> None:
    sanitized.start("job", 3)
    sanitized.reach(2)
    gates = sanitized.gates()
    for move in range(4):
        if move < 3:
            rebuild(gates, fresh=move)
        else:
            cancel_an_attach(gates)  # last: an id that was not used keeps a thread of NCCL
        before = max(sanitized.steps())
        gates.all(OPEN)
        sanitized.reach(before + 2)
    sanitized.stop()
    assert "Sanitizer" not in sanitized.output()
