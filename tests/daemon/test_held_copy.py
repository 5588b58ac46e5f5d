"""A copy that is held on its target builds communicators while no thread of the job runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, NcclFailed, Timeout
from snapshotd.inprocess import ncclctl, shimctl
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import held_copy
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.record_parts import NcclProcess
from snapshotd.proc import tree
from snapshotd.proc.tree import Process

MOVE = "m-0123456789ab"
BEFORE, FRESH = 1, 2


class Copy:
    """Two stopped processes; the first had communicators. Its cgroup only records requests."""

    def __init__(self) -> None:
        self.running = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        self.speaker, self.other = (Process.of(process.pid) for process in self.running)
        for process in (self.speaker, self.other):
            process.signal(signal.SIGSTOP)
            until_stopped(process)
        self.said: list[str] = []
        self.instance, self.parked, self.failing = BEFORE, True, False
        member = NcclProcess(self.speaker.pid, self.speaker.start_ticks, BEFORE)
        self.log: Any = SimpleNamespace(record=MoveRecord(nccl_processes=[member], cgroup="/none"))

    def find(self, process: Process) -> Any:
        return SimpleNamespace(state=lambda: SimpleNamespace(parked=self.parked))

    def read(self, process: Process) -> Any:
        assert not tree.stopped(process.pid), "asked before it was continued"
        return SimpleNamespace(instance=self.instance)

    def load_fresh(self, process: Process, timeout_s: float) -> None:
        self.said.append("fresh")
        self.instance = FRESH

    def cgroup(self, path: Path) -> Any:
        return SimpleNamespace(
            thaw=lambda limit_s: self.said.append("thaw"), freeze=lambda limit_s: self.said.append("freeze")
        )


def until_stopped(process: Process) -> None:
    while not tree.stopped(process.pid):
        time.sleep(0.001)


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    made = Copy()
    monkeypatch.setattr(shimctl, "find", made.find)
    monkeypatch.setattr(ncclctl, "read", made.read)
    monkeypatch.setattr(ncclctl, "load_fresh", made.load_fresh)
    monkeypatch.setattr(held_copy, "Cgroup", made.cgroup)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


async def test_only_processes_with_communicators_are_continued(copy: Copy) -> None:
    assert await held_copy.wake_shim(copy.log) == [copy.speaker]
    assert not tree.stopped(copy.speaker.pid)
    assert tree.stopped(copy.other.pid)
    await held_copy.still(copy.log)
    assert tree.stopped(copy.speaker.pid)
    assert copy.said == ["thaw", "fresh", "freeze"]


async def test_fresh_library_is_loaded_once(copy: Copy) -> None:
    """A unique id is valid only in the library copy that made it."""
    await held_copy.wake_shim(copy.log)
    await held_copy.wake_shim(copy.log)
    assert copy.said.count("fresh") == 1


async def test_process_with_unparked_threads_stays_stopped(copy: Copy) -> None:
    copy.parked = False
    with pytest.raises(NcclFailed):
        await held_copy.wake_shim(copy.log)
    assert tree.stopped(copy.speaker.pid)


def test_process_that_does_not_stop_leaves_the_others_stopped(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(copy.speaker.pid, signal.SIGCONT)
    monkeypatch.setattr(Process, "signal", lambda self, number: True)  # as if it were in uninterruptible sleep
    with pytest.raises(Timeout):
        tree.stop_again([copy.speaker], 0.05)
    assert tree.stopped(copy.other.pid)


class Gated(SimpleNamespace):
    """A node that has no closed gate for the move, only the copy, on its one GPU."""

    def __init__(self) -> None:
        super().__init__(node=SimpleNamespace(gpus=SimpleNamespace(inventory=self._inventory)))

    async def _inventory(self) -> Any:
        return SimpleNamespace(gpus=[pb.Gpu(uuid="GPU-here", bus_id="0000:1b:00.0")])


@pytest.fixture
def members(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> Members:
    def attach(process: Process, lines: list[str], timeout_s: float, given_up: threading.Event) -> None:
        copy.said.append("attach")
        if copy.failing:
            raise NcclFailed("ncclCommInitRank answers 6")

    monkeypatch.setattr(ncclctl, "attach", attach)
    copy.log.begin = SimpleNamespace(rank_uid="job-0", source_node="a", coordinator="")
    copy.log.move = MOVE
    moving = Moving(copy.log)
    return Members(Gated(), lambda move: moving)  # type: ignore[arg-type]


def asked(*comms: str) -> pb.AttachRequest:
    named = [pb.CommId(comm=comm, unique_id="ab" * 128) for comm in comms]
    return pb.AttachRequest(move=MOVE, rank_uids=["job-0"], comms=named)


async def test_copy_whose_cuda_reports_the_former_bus_id_builds_nothing(
    copy: Copy, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL tells the GPUs of a host apart by it. No other member has begun to build anything yet."""
    copy.log.record = msgspec.structs.replace(copy.log.record, gpus_reserved=["GPU-here"])
    reported = {0: "0000:5d:00.0"}
    monkeypatch.setattr(ncclctl, "devices", lambda process, timeout_s: reported)
    with pytest.raises(NcclFailed, match=r"onto the GPU at 0000:1b:00.0, but CUDA .* its device 0 is at 0000:5d:00.0"):
        await members.attach(asked(), "a")
    assert tree.stopped(copy.speaker.pid)
    reported[0] = "0000:1b:00.0"
    await members.attach(asked("0" * 16), "a")
    assert copy.said[-1] == "attach"


async def test_copy_is_prepared_before_members_build(copy: Copy, members: Members) -> None:
    await members.attach(asked(), "a")
    assert copy.said == ["thaw", "fresh"]
    assert not tree.stopped(copy.speaker.pid)
    await members.attach(asked("0" * 16), "a")
    assert copy.said == ["thaw", "fresh", "thaw", "attach"]
    assert not tree.stopped(copy.speaker.pid), "other members may wait for what its NCCL has not sent yet"
    assert tree.stopped(copy.other.pid)


async def test_copy_is_stopped_again_after_an_nccl_failure(copy: Copy, members: Members) -> None:
    copy.failing = True
    with pytest.raises(NcclFailed):
        await members.attach(asked("0" * 16), "a")
    assert copy.said[-1] == "freeze"
    assert tree.stopped(copy.speaker.pid)


async def test_give_up_during_the_wake_builds_nothing_and_stops_the_copy(
    copy: Copy, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told_meanwhile(point: object) -> None:
        assert (await members.give_up(MOVE, "a")).building

    monkeypatch.setattr("snapshotd.moves.nccl.members.reach", told_meanwhile)
    with pytest.raises(Timeout, match="given up building"):
        await members.attach(asked("0" * 16), "a")
    assert copy.said == ["thaw", "fresh", "freeze"]
    assert tree.stopped(copy.speaker.pid)
    assert not (await members.give_up(MOVE, "a")).building


async def test_only_the_source_may_wake_the_copy(copy: Copy, members: Members) -> None:
    with pytest.raises(Denied):
        await members.attach(asked("0" * 16), "b")
    assert tree.stopped(copy.speaker.pid)


async def test_copy_woken_before_a_restart_is_stopped_again(
    copy: Copy, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.gates.node = SimpleNamespace(journal=SimpleNamespace(all=lambda: [copy.log]))  # type: ignore[assignment]
    monkeypatch.setattr(Moving, "same_boot", True)
    await held_copy.wake_shim(copy.log)
    await members.adopt_copies()
    assert tree.stopped(copy.speaker.pid)
    monkeypatch.setattr(held_copy, "still", _never)
    await members.adopt_copies()  # a copy that does not stop must not prevent the start


async def _never(move_log: object) -> None:
    raise Timeout("it does not stop")
