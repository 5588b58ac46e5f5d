"""Finds the processes of a rank that hold CUDA. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone, Refused, Where
from snapshotd.cuda import library
from snapshotd.cuda.driver import Gpus
from snapshotd.cuda.states import State
from snapshotd.preflight.reports import DriverReport, uses_cuda
from snapshotd.preflight.verdict import refused
from snapshotd.proc import tree
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread


async def find(gpus: Gpus, pids: Sequence[int]) -> tuple[DriverReport | None, list[pb.Check]]:
    """The CUDA side of preflight: which of these processes hold CUDA, and this node's GPUs. None: no process does."""
    candidates = await in_thread(uses_cuda, pids)
    if not candidates:
        return None, []
    stopped = [pid for pid in candidates if tree.stopped(pid)]
    if stopped:
        return None, [
            refused(
                "gpu-stopped",
                f"stopped by a signal, so that the CUDA driver in it cannot answer: {', '.join(map(str, stopped))}",
                f"continue it (kill -CONT {stopped[0]})",
            )
        ]
    holders = []
    for pid in candidates:
        try:
            state = await gpus.state(Process.of(pid))
            if state is None or (state is State.RUNNING and await in_thread(library.found_no_gpu, pid)):
                continue
            holders.append(pid)
        except (ProcessLookupError, RankGone):
            continue
    if not holders:
        return None, []
    inventory = await gpus.inventory(fresh=True)  # a cached inventory may lack a rank that has just started
    cards, lost = tuple(inventory.gpus), tuple(inventory.lost)
    return DriverReport(inventory.driver_version, cards, tuple(holders), inventory.problem, lost), []


async def must_find(gpus: Gpus, pids: Sequence[int]) -> list[Process]:
    """The processes that hold CUDA now. Raises Refused when the driver cannot report them."""
    found, refusals = await find(gpus, pids)
    for check in refusals:
        raise Refused(f"{check.name}: {check.reason}", remedy=check.remedy, where=Where.SOURCE_RUNNING)
    holders = []
    for pid in found.cuda_pids if found is not None else ():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            holders.append(Process.of(pid))
    return holders
