"""Cancels the building of communicators of the real NCCL while its blocking initialisation waits for a member.

    integration/gpu/run --exec python3 -m integration.gpu.nccl_cancel

Two ranks on one GPU (each with its own NCCL_HOSTID) create two communicators, and launch nothing afterwards. Both are taken
down, then only rank 0 builds them again, which cannot end. It is cancelled: NCCL's calls must return, the process must live,
and the communicators must be detached. Then both ranks build them, all at once. Nothing is moved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from integration.gpu.nccl_probe import PRESETS, ROOT, SHIM
from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess import nccl_lines, ncclctl
from snapshotd.proc import tree

START_S, STEP_S, WAIT_S = 120.0, 60.0, 5.0
ROUNDS = 5


def be_the_rank(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensor = torch.ones(16, device="cuda")
    for group in (None, dist.new_group([0, 1])):
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
    (folder / f"ready-{rank}").touch()
    while not (folder / "end").exists():
        time.sleep(0.05)
    os._exit(0)  # two kernels at once on one GPU are not the subject here


def must(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(what)
        time.sleep(0.02)


def states(process: tree.Process) -> set[str]:
    return {comm.state for comm in ncclctl.read(process).comms}


def cancel_once(ranks: list[tree.Process], comms: list[str]) -> float:
    """Returns how long the cancelled command took to answer."""
    for process in ranks:
        ncclctl.detach(process, comms, STEP_S)
    ids = {comm: ncclctl.new_id(ranks[0], STEP_S) for comm in comms}
    lines = [nccl_lines.attach_line(comm, ids[comm], untried=True) for comm in comms]
    given_up = threading.Event()
    cancelled_at = 0.0

    def cancel() -> None:
        nonlocal cancelled_at
        time.sleep(WAIT_S)
        cancelled_at = time.monotonic()
        given_up.set()

    threading.Thread(target=cancel).start()
    try:
        ncclctl.attach(ranks[0], lines, 600.0, given_up)
    except SnapshotError as error:
        print(f"  cancelled: {error.message}", flush=True)
    else:
        raise AssertionError("one of two members built the communicators alone")
    took_s = time.monotonic() - cancelled_at
    must(
        lambda: states(ranks[0]) == {"detached"}, STEP_S, "the communicators of the cancelled attempt are not detached"
    )
    return took_s


def attach_all(ranks: list[tree.Process], comms: list[str]) -> float:
    lines = [nccl_lines.attach_line(comm, ncclctl.new_id(ranks[0], STEP_S), untried=True) for comm in comms]
    failures: list[BaseException] = []

    def attach(process: tree.Process) -> None:
        try:
            ncclctl.attach(process, lines, STEP_S)
        except SnapshotError as error:
            failures.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=attach, args=(process,)) for process in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(states(process) == {"live"} for process in ranks)
    return time.monotonic() - began


def run() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = []
        for rank in range(2):
            environment = {**os.environ, **PRESETS, "LD_PRELOAD": str(SHIM), "NCCL_SOCKET_IFNAME": "lo"}
            environment["NCCL_HOSTID"] = f"rank-{rank}"
            command = [sys.executable, "-m", "integration.gpu.nccl_cancel", "--be-the-rank", name, str(rank)]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        try:
            must(
                lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)), START_S, "the ranks do not start"
            )
            ranks = [tree.Process.of(process.pid) for process in started]
            comms = sorted(comm.id for comm in ncclctl.read(ranks[0]).comms)
            assert len(comms) >= 2, comms
            for rank_process in ranks:
                ncclctl.close(rank_process)
            for number in range(ROUNDS):
                cancelled_s = cancel_once(ranks, comms)
                built_s = attach_all(ranks, comms)
                assert all(process.poll() is None for process in started), "a rank has died"
                print(f"round {number}: answered {cancelled_s:.2f} s after it was cancelled", flush=True)
                print(f"  {len(comms)} communicators built in {built_s:.2f} s", flush=True)
            for rank_process in ranks:
                ncclctl.open_gate(rank_process)
            (folder / "end").touch()
            assert [process.wait(STEP_S) for process in started] == [0, 0]
        finally:
            for process in started:
                process.kill()
                process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--be-the-rank", nargs=2, metavar=("FOLDER", "RANK"))
    if given := parser.parse_args().be_the_rank:
        be_the_rank(Path(given[0]), int(given[1]))
    else:
        run()
