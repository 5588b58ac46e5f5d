"""Brings a GPU rank to a standstill: the shim parks its threads, its GPU work is drained and locked, the rest is stopped.

The CUDA driver works only inside a running process, so a CUDA process cannot simply be stopped first. Its own threads are
parked, then its work is drained (lock). Only then does the driver, whose threads still run, copy device memory
(snapshotd/moves/device/memory.py).

Invariant: from `still` until `let_go` no thread of the job runs, on either node. Every operation can be repeated: the driver
and the shim are asked what is left to do; nothing is remembered. A thread whose device memory is offloaded
(snapshotd/moves/device/offload.py) is never released.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from snapshotd.api.errors import GpuFailed, RankGone, Timeout, Where
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess import shimctl
from snapshotd.inprocess.shimctl import InDriver
from snapshotd.moves.device.parts import Parts, each
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import PidList, Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: How long submitted GPU work may take to drain, and so how long a thread may take to leave the driver.
LOCK_S = 10.0
PARK_S = 5.0
STOP_S = 10.0


class _Others(PidList):
    """The processes of a rank that are not parked."""

    def __init__(self, group: Cgroup, holders: Iterable[Process]) -> None:
        self._group, self._holders = group, {process.pid for process in holders}

    def pids(self) -> list[int]:
        return [pid for pid in self._group.pids() if pid not in self._holders]


async def hold(
    gpus: Gpus, processes: Sequence[Process], group: Cgroup, parts: Parts, nccl: Iterable[Process] = ()
) -> None:
    """Brings the job to a standstill: threads parked, work on the GPU drained and locked, other processes stopped.

    `nccl`: processes that build communicators on the target before anything of the job runs there; they are parked as well,
    with CUDA or without. If it fails the rank is somewhere in between, and `memory.bring_back` undoes it from there.
    """
    parking = parked_ones(processes, nccl)
    if not parking:
        return
    await still(gpus, processes, parking, parts)
    await stop_others(group, parking)


async def stop_others(group: Cgroup, parking: Iterable[Process]) -> None:
    """Stops the processes of the rank that are not parked, including any that were just forked."""
    await in_thread(tree.stop_all, _Others(group, parking), STOP_S)


async def still(gpus: Gpus, processes: Sequence[Process], parking: Sequence[Process], parts: Parts) -> None:
    """Parks the threads of `parking`, then drains and locks the work of `processes` on the GPU.

    Threads are parked first, outside the driver. A thread that waits for the driver's lock gets a share of it as soon as it
    is released, parked or not, and a caller that needs the lock exclusively then waits for ever. The driver is locked first
    only if the threads do not leave it, or if it waits for a thread that was parked inside it after all.
    """
    try:
        await _park(parking, parts, LOCK_S, outside_driver=True)
        if not processes:
            return
        await reach(Point.PARKED)
        try:
            await _lock(gpus, processes, parts)
        except Timeout as error:  # a parked thread blocks it, or the GPU is busy
            raise InDriver(error.message, where=error.where) from error
    except InDriver as error:
        if not processes:
            raise
        log.info("locking the driver before parking threads: %s", error.message)
        await let_go(parking)
        await _lock(gpus, processes, parts)
        await _park(parking, parts, PARK_S)
    await reach(Point.LOCKED)


async def _park(parking: Sequence[Process], parts: Parts, limit_s: float, *, outside_driver: bool = False) -> None:
    def park(process: Process) -> None:
        _mailbox(process).park(limit_s, outside_driver=outside_driver)

    await parts.time("park", each(parking, lambda process: in_thread(park, process)))


async def _lock(gpus: Gpus, processes: Sequence[Process], parts: Parts) -> None:
    await parts.time("lock", each(processes, lambda process: gpus.lock(process, LOCK_S)))


def parked_ones(cuda: Iterable[Process], nccl: Iterable[Process]) -> list[Process]:
    return sorted({*cuda, *nccl})


def must_be_parked(process: Process) -> None:
    mailbox = shimctl.find(process)
    if mailbox is None or not mailbox.state().parked:
        raise GpuFailed(
            f"the threads of the restored process {process.pid} are not parked: it stays stopped",
            remedy="the job continues on its source; `migrator check` names threads that cannot be parked",
            where=Where.SOURCE_FROZEN,
        )


async def let_go(processes: Sequence[Process]) -> None:
    """Releases the parked threads. The processes must run. Idempotent. None is released while memory that one of them shares
    is closed: another one could free it."""
    await each(processes, lambda process: in_thread(_must_be_open, process))
    await each(processes, lambda process: in_thread(_release, process))


def _must_be_open(process: Process) -> None:
    with contextlib.suppress(RankGone):  # a child may end; the others continue
        mailbox = shimctl.find(process)
        if mailbox is not None and mailbox.state().shared_closed:
            raise GpuFailed(
                f"device memory that process {process.pid} shares with others is not open again: its threads stay parked",
                where=Where.SOURCE_FROZEN,
            )


def _release(process: Process) -> None:
    try:
        mailbox = shimctl.find(process)
        if mailbox is None:
            return
        state = mailbox.state()
        if state.device_offloaded:
            raise GpuFailed(
                f"the device memory of process {process.pid} is not back on its GPU: its threads stay parked",
                where=Where.SOURCE_FROZEN,
            )
        if state.parked:
            mailbox.release(PARK_S)
    except RankGone:
        return  # a child may end; the others continue


def parked(processes: Iterable[Process]) -> bool:
    """Whether the threads of one of them are still parked. Blocking."""
    mailboxes = [shimctl.find(process) for process in processes if process.alive()]
    return any(mailbox is not None and mailbox.state().parked for mailbox in mailboxes)


def _mailbox(process: Process) -> shimctl.Mailbox:
    mailbox = shimctl.find(process)
    if mailbox is None:
        raise GpuFailed(
            f"the shim is not active in process {process.pid}",
            remedy="start the job with `migrator run`; a statically linked program cannot be moved",
            where=Where.SOURCE_RUNNING,
        )
    return mailbox
