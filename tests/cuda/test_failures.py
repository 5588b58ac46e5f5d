"""The helper hangs, dies or is killed; processes are stopped; callers give up; the daemon dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.cuda import helper_pool
from snapshotd.cuda.driver import Gpus, State
from snapshotd.proc import cgroup, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from tests.cuda.processes import CudaProgram, helpers, wait_until
from tests.fakes.cuda_fake import GpuNode


async def taken(node: GpuNode) -> None:
    """Waits until the fault has been reached, so that the call is inside the driver."""
    await asyncio.to_thread(wait_until, lambda: not node.faults())


async def test_daemon_loads_neither_library(gpus: Gpus, program: CudaProgram) -> None:
    assert await gpus.state(program.process) is State.RUNNING
    await gpus.inventory()
    assert not {"libcuda.so.1", "libnvidia-ml.so.1"} & {
        Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines()
    }
    maps = Path(f"/proc/{helpers()[0]}/maps").read_text()
    assert "libcuda.so.1" in maps
    assert "libnvidia-ml.so.1" in maps


def stop(process: Process) -> None:
    process.signal(signal.SIGSTOP)
    wait_until(lambda: tree.stopped(process.pid))


class TestStoppedProcess:
    async def test_state_times_out(self, gpus: Gpus, program: CudaProgram) -> None:
        process = program.process
        assert await gpus.state(process) is State.RUNNING
        (before,) = helpers()
        stop(process)
        with pytest.raises(Timeout, match=r"the CUDA state of process \d+ .*; the process is stopped") as got:
            await gpus.state(process, 0.5)
        assert "works inside the process" in got.value.advice
        wait_until(lambda: before not in helpers())
        process.signal(signal.SIGCONT)
        assert await gpus.state(process) is State.RUNNING

    @pytest.mark.root
    async def test_frozen_cgroup_is_named(self, gpus: Gpus, program: CudaProgram) -> None:
        group = Cgroup(cgroup.of_process(os.getpid()) / f"test-cuda-{os.getpid()}").create()
        try:
            group.add(program.process.pid)
            group.freeze(5)
            with pytest.raises(Timeout, match="; its cgroup is frozen"):
                await gpus.state(program.process, 0.5)
            group.thaw(5)
            assert await gpus.state(program.process) is State.RUNNING
        finally:
            group.kill(5)
            program.end()
            group.remove()

    async def test_lock_that_was_given_up_takes_effect_later(self, gpus: Gpus, program: CudaProgram) -> None:
        process = program.process
        stop(process)
        with pytest.raises(Timeout, match=r"\(the lock of process \d+ .*; the process is stopped"):
            await gpus.lock(process, 0.2)
        process.signal(signal.SIGCONT)
        assert await gpus.state(process) is State.LOCKED
        await gpus.lock(process, 5)
        await gpus.unlock(process, 5)


class TestHangs:
    @pytest.mark.parametrize("verb", ["checkpoint", "unlock"])
    async def test_error_names_the_state(self, gpus: Gpus, node: GpuNode, program: CudaProgram, verb: str) -> None:
        process = program.process
        await gpus.lock(process, 5)
        (before,) = helpers()
        node.fault(verb, "hang")
        with pytest.raises(Timeout, match=rf"\(the {verb} of process \d+ .*; its CUDA state is locked"):
            await getattr(gpus, verb)(process, 0.5)
        wait_until(lambda: before not in helpers())
        await getattr(gpus, verb)(process, 10)

    async def test_error_says_that_the_state_is_unknown(self, gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
        node.fault("lock", "hang", once=False)
        node.fault("state", "hang", once=False)
        with pytest.raises(Timeout, match="its CUDA state is unknown"):
            await gpus.lock(program.process, 0.1)

    async def test_operation_done_without_answer_is_done(self, gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
        await gpus.lock(program.process, 5)
        node.fault("checkpoint", "hang-after")
        await gpus.checkpoint(program.process, 1)
        assert await gpus.state(program.process) is State.CHECKPOINTED

    async def test_driver_that_does_not_initialise_is_reported(
        self, gpus: Gpus, node: GpuNode, start: Callable[[], CudaProgram], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One helper is tried for all callers."""
        one, other = start(), start()
        monkeypatch.setattr(helper_pool, "INIT_S", 0.5)
        node.fault("init", "hang")
        asked = gpus.state(one.process), gpus.lock(other.process, 5)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["the CUDA driver did not initialise within 0.5 s (cuInit)"] * 2
        monkeypatch.setattr(helper_pool, "INIT_S", 60)  # the next helper may need longer on a busy machine
        assert await gpus.state(other.process) is State.RUNNING

    async def test_initialisation_does_not_count_for_the_time_limit(
        self, gpus: Gpus, program: CudaProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = tmp_path / "late"
        late.write_text(f'#!/bin/sh\nsleep 1.5\nexec {sys.executable} "$@"\n')
        late.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(late))
        assert await gpus.state(program.process, 1) is State.RUNNING

    async def test_hanging_call_does_not_affect_other_calls(
        self, gpus: Gpus, node: GpuNode, start: Callable[[], CudaProgram], caplog: pytest.LogCaptureFixture
    ) -> None:
        """One call hangs, beside a longer checkpoint, a waiting lock and an inventory."""
        stuck, slow, busy = start(), start(), start()
        await gpus.lock(stuck.process, 5)
        await gpus.lock(slow.process, 5)
        busy.tell("spin", 3)
        node.fault("checkpoint", "hang", pid=stuck.process.pid)
        node.fault("checkpoint", "slow:2000", pid=slow.process.pid)
        answers = await asyncio.gather(
            gpus.checkpoint(stuck.process, 1),
            gpus.checkpoint(slow.process, 30),
            gpus.lock(busy.process, 30),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [Timeout, type(None), type(None)]
        assert await gpus.state(slow.process) is State.CHECKPOINTED
        assert await gpus.state(busy.process) is State.LOCKED
        again = [record.getMessage() for record in caplog.records if "is repeated" in record.getMessage()]
        assert len(again) == 2
        assert all("checkpoint did not answer within 1 s" in line for line in again)

    async def test_calls_do_not_wait_for_each_other(
        self, gpus: Gpus, node: GpuNode, start: Callable[[], CudaProgram]
    ) -> None:
        first, second = start(), start()
        await gpus.lock(first.process, 5)
        node.fault("checkpoint", "hang")
        hanging = asyncio.create_task(gpus.checkpoint(first.process, 6))
        await taken(node)
        await gpus.lock(second.process, 5)
        await gpus.checkpoint(second.process, 5)
        assert not hanging.done()
        os.kill(helpers()[0], signal.SIGKILL)  # the hanging request is repeated, and does not hang again
        await hanging


class TestDeaths:
    @pytest.mark.parametrize("how", ["die", "die-after"])
    @pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
    async def test_call_whose_helper_dies_is_done_exactly_once(
        self, gpus: Gpus, node: GpuNode, program: CudaProgram, verb: str, how: str
    ) -> None:
        """The work is still done exactly once, whether the process had begun it or not."""
        process = program.tell("allocate", 16).process
        node.fault(verb, how)
        await gpus.lock(process, 5)
        await gpus.checkpoint(process, 10)
        await gpus.restore(process, [], 10)
        await gpus.unlock(process, 5)
        assert node.faults() == []
        assert await gpus.state(process) is State.RUNNING

    async def test_helper_that_dies_every_time_is_reported(
        self, gpus: Gpus, node: GpuNode, program: CudaProgram
    ) -> None:
        node.fault("lock", "die", once=False)
        with pytest.raises(GpuFailed, match=r"the lock of process \d+ .*: the GPU helper exited with SIGKILL"):
            await gpus.lock(program.process, 30)
        node.clear_faults()
        await gpus.lock(program.process, 5)

    async def test_helper_killed_between_calls_is_replaced(self, gpus: Gpus, program: CudaProgram) -> None:
        assert await gpus.state(program.process) is State.RUNNING
        (helper,) = helpers()
        os.kill(helper, signal.SIGKILL)
        assert await gpus.state(program.process) is State.RUNNING
        assert helper not in helpers()

    async def test_closed_helper_refuses_calls(self, gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
        await gpus.lock(program.process, 5)
        node.fault("checkpoint", "hang")
        hanging = asyncio.create_task(gpus.checkpoint(program.process, 60))
        await taken(node)
        await gpus.close()
        with pytest.raises(GpuFailed, match="the daemon is exiting"):
            await hanging
        with pytest.raises(GpuFailed, match="the daemon is exiting"):
            await gpus.unlock(program.process, 5)
        assert helpers() == []

    async def test_helper_that_cannot_be_started_is_reported(
        self, gpus: Gpus, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(GpuFailed, match="the GPU helper cannot be started: No such file"):
            await gpus.lock(program.process, 5)
        assert (await gpus.inventory()).problem == "the GPU helper cannot be started: No such file or directory"

    async def test_invalid_answer_is_reported(
        self,
        gpus: Gpus,
        program: CudaProgram,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        nonsense = tmp_path / "nonsense"
        nonsense.write_text("#!/bin/sh\nread line\necho What?\nexec sleep 600\n")
        nonsense.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(nonsense))
        with pytest.raises(GpuFailed, match="it sent an invalid answer"):
            await gpus.state(program.process, 20)
        assert len([each for each in caplog.records if "sent an invalid answer" in each.getMessage()]) == 3


async def test_cancelled_caller_waits_for_the_driver(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    await gpus.lock(program.process, 5)
    node.fault("checkpoint", "slow:1000")
    task = asyncio.create_task(gpus.checkpoint(program.process, 20))
    await taken(node)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # NVML sends no request to the process, so it shows whether the call is done. A query of the state would wait for it.
    assert [list(gpu.processes) for gpu in (await gpus.inventory()).gpus] == [[], []]
    assert await gpus.state(program.process) is State.CHECKPOINTED


async def test_cancelled_caller_waits_no_longer_than_its_limit(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    await gpus.lock(program.process, 5)
    node.fault("checkpoint", "hang")
    (helper,) = helpers()
    task = asyncio.create_task(gpus.checkpoint(program.process, 1))
    await taken(node)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: helper not in helpers())
    assert await gpus.state(program.process) is State.LOCKED


DAEMON = """
import asyncio, sys
from snapshotd.cuda.driver import Gpus
from snapshotd.proc.tree import Process

async def main():
    gpus = Gpus(sys.argv[1])
    process = Process.of(int(sys.argv[2]))
    print(await gpus.state(process), flush=True)
    await gpus.lock(process, 600)

asyncio.run(main())
"""


async def test_helper_dies_with_the_daemon(node: GpuNode, program: CudaProgram) -> None:
    """Also while it hangs in the driver, and although its answers are no longer read."""
    program.tell("spin", 600)
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, node.library_dir, str(program.process.pid)], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "State.RUNNING\n"
    (helper,) = helpers(daemon.pid)
    daemon.kill()
    daemon.communicate()
    wait_until(lambda: not Path(f"/proc/{helper}").exists())
