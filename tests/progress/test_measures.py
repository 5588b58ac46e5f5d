"""The progress of real processes: of a job on the fake NCCL, of one with a connection, and of one with neither."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry
from snapshotd.proc import foreign_memory
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.stat import read as read_stat
from snapshotd.progress import sampler, schedule
from snapshotd.progress.measures import Rank, read_twice
from snapshotd.progress.sampler import Sampler
from tests.proc.test_foreign_memory import Silent, silent  # noqa: F401 - a fixture
from tests.shim.nccl.conftest import Job, built, job  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reading the memory of other processes needs root")


def group_of(folder: Path, pid: int) -> Cgroup:
    """What a rank's cgroup says, as files."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.procs").write_text(f"{pid}\n")
    (folder / "cpu.stat").write_text("usage_usec 4711\nuser_usec 0\n")
    return Cgroup(folder)


def test_operations_of_nccl_are_the_measure_of_a_rank_that_uses_it(job: Job, tmp_path: Path) -> None:  # noqa: F811
    job.start("jobs.plain", 2)
    job.reach(2)
    ranks = {
        str(number): Rank(group_of(tmp_path / f"group-{number}", process.pid))
        for number, process in enumerate(job.processes)
    }
    kinds, before = zip(*(rank.measure(0.0) for rank in ranks.values()), strict=True)
    assert set(kinds) == {pb.RankProgress.NCCL}
    job.reach(max(job.steps()) + 2)
    assert all(rank.measure(1.0)[1] > value for rank, value in zip(ranks.values(), before, strict=True))

    while not (found := read_twice(ranks, time.time())):  # a busy machine may be too late
        pass
    (first,), (second,) = (set(found[uid]) for uid in ("0", "1"))
    assert (first[0], first[1], second[1]) == (second[0], 0, 1)  # one communicator, two members
    for mine in found.values():
        for reading in mine.values():
            assert reading.nranks == 2
            assert 0 < reading.early <= reading.late
    assert read_twice(ranks, time.time() - 10) == {}
    job.stop()
    assert ranks["0"].collectives() == {}
    assert ranks["0"].measure(2.0)[0] == pb.RankProgress.CPU


def test_a_rank_without_nccl_is_measured_by_its_connections_and_then_by_its_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {port}))\n"
            "while s.recv(1): pass\ns.close(); print(flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            rank = Rank(group_of(tmp_path / "group", process.pid))
            with listener.accept()[0] as connection:
                connection.sendall(b"x")
                kind, before = rank.measure(0.0)
                assert kind == pb.RankProgress.TCP
                connection.sendall(b"x" * 10_000)
                deadline = time.monotonic() + 60
                while rank.measure(1.0) == (kind, before):
                    assert time.monotonic() < deadline
            assert process.stdout is not None
            process.stdout.readline()
            assert rank.measure(2.0) == (pb.RankProgress.CPU, 4711)
            process.communicate()


async def test_readings_are_kept_for_the_autopilot_and_not_made_during_moves(
    job: Job,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "MEASURE_S", 0.05)
    job.start("jobs.plain", 2)
    await asyncio.to_thread(job.reach, 2)
    entries = []
    for number, process in enumerate(job.processes):
        group = group_of(tmp_path / f"group-{number}", process.pid)
        ids = {"pid": process.pid, "start_ticks": read_stat(process.pid).start_ticks, "user_id": os.geteuid()}
        home = {"home_node": "n", "home_endpoint": "", "relay_key": "", "boot_id": "", "role": "home"}
        keeper = {"keeper_pid": 1, "keeper_start_ticks": 1, "cgroup": str(group.path)}
        entries.append(RankEntry(f"r{number}", "train", number, **ids, **home, **keeper))  # type: ignore[arg-type]
    moving = True
    made = Sampler(lambda: entries, lambda: moving, 0.1)
    made.start()
    try:
        await asyncio.sleep(0.5)
        assert not any(rank.communicators for rank in made.since(pb.GetProgressRequest()).ranks)
        moving = False
        deadline = time.monotonic() + 60
        while True:
            reply = made.since(pb.GetProgressRequest())
            numbers = [set(comm.numbers) for rank in reply.ranks for comm in rank.communicators]
            if len(numbers) == 2 and len(common := numbers[0] & numbers[1]) >= 5:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert [rank.measure for rank in reply.ranks] == [pb.RankProgress.NCCL] * 2
        assert reply.period_ms == 100
        assert max(common) <= schedule.number_at(time.time(), 0.1)
        later = made.since(pb.GetProgressRequest(after=max(common)))
        assert all(
            number > max(common) for rank in later.ranks for comm in rank.communicators for number in comm.numbers
        )
        entries.pop()
        while len(made.since(pb.GetProgressRequest()).ranks) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    finally:
        await made.stop()
    job.stop()


def test_a_rank_whose_memory_does_not_answer_is_left_alone(
    silent: Silent,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign_memory.read, "__defaults__", (0.5,))
    process, _ = silent("libsnapshim.so")
    rank = Rank(group_of(tmp_path / "group", process.pid))
    assert rank.measure(0.0)[0] == pb.RankProgress.CPU
    assert rank.search_at_s == 60.0
    assert rank.measure(10.0)[0] == pb.RankProgress.CPU
    assert rank.collectives() == {}
    assert rank.search_at_s == 60.0  # it was not asked again
    assert rank.measure(61.0)[0] == pb.RankProgress.CPU
    assert rank.search_at_s == 61.0 + 120.0
