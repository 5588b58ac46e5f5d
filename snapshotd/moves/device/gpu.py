"""A rank's device memory: taken off the GPU before the freeze, and given back by whoever may run the rank.

The driver works only inside a running process, so a CUDA process cannot simply be stopped first: its own threads are parked
by the shim, its work is drained (lock), and only then does the driver, whose threads alone still run, copy device memory
into the process (checkpoint). On the target the same in reverse, under the parked threads.

Invariant: from `still` until `let_go` no thread of the job runs, on either node. Every act here can be repeated: what is
left to do is asked of the driver and of the shim, never remembered. A thread whose device memory is in stripes (see
snapshotd/moves/device/offload.py) is never let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.cuda.inventory import Inventory
from snapshotd.inprocess import devmem, shimctl
from snapshotd.inprocess.shimctl import InDriver
from snapshotd.preflight.reports import DriverReport, uses_cuda
from snapshotd.preflight.verdict import refused
from snapshotd.proc import host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import PidList, Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: How long the interpreter may take to reach a point where the caching allocator can be emptied; the job runs meanwhile.
EMPTY_CACHE_S = 1.0
#: How long work already given to the GPU may take to drain, and so a thread to leave the driver.
LOCK_S = 10.0
PARK_S = 5.0
#: What a checkpoint or a restore may take: so much for any, and so much for every GiB of device memory.
COPY_S, COPY_GIB_S = 30.0, 4.0
STOP_S = 10.0
#: What a CUDA context takes on a GPU before the job has allocated anything, about.
CONTEXT_BYTES = 512 << 20


class Lost(Exception):
    """The driver has lost a process's device memory: it can never run again."""


async def look(gpus: Gpus, pids: Sequence[int]) -> tuple[DriverReport | None, list[pb.Check]]:
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
            if await gpus.state(Process.of(pid)) is not None:
                holders.append(pid)
        except (ProcessLookupError, RankGone):
            continue
    if not holders:
        return None, []
    inventory = await gpus.inventory(fresh=True)  # a rank that has just begun is not in what was seen a second ago
    return DriverReport(inventory.driver_version, tuple(inventory.gpus), tuple(holders), inventory.problem), []


class _Others(PidList):
    """The processes of a rank that are not parked."""

    def __init__(self, group: Cgroup, holders: Iterable[Process]) -> None:
        self._group, self._holders = group, {process.pid for process in holders}

    def pids(self) -> list[int]:
        return [pid for pid in self._group.pids() if pid not in self._holders]


class Parts:
    """Where the time of a step went."""

    def __init__(self) -> None:
        self.all: list[pb.Part] = []

    async def time(self, name: str, work: Awaitable[Any], bytes_: int = 0) -> Any:
        began = host.boottime_s()
        result = await work
        self.add(name, host.boottime_s() - began, bytes_)
        return result

    def add(self, name: str, seconds: float, bytes_: int = 0) -> None:
        """What is done again counts as one part."""
        known = next((part for part in self.all if part.name == name), None)
        if known is None:
            self.all.append(pb.Part(name=name, seconds=seconds, bytes=bytes_))
        else:
            known.seconds += seconds
            known.bytes += bytes_


async def empty_caches(processes: Sequence[Process], parts: Parts) -> int:
    """The caching allocators' free blocks go back to the driver; the rank runs on. Returns the bytes; never raises."""
    if not processes:
        return 0
    given = await parts.time("empty-cache", each(processes, lambda process: in_thread(_empty_cache, process)))
    freed = int(sum(given))
    parts.all[-1].bytes = freed
    return freed


def _empty_cache(process: Process) -> int:
    try:
        mailbox = shimctl.find(process)
        return (mailbox.empty_cache(EMPTY_CACHE_S) or 0) if mailbox is not None else 0
    except SnapshotError:  # a child that ends meanwhile has no cache
        return 0


async def hold(
    gpus: Gpus, processes: Sequence[Process], group: Cgroup, parts: Parts, nccl: Iterable[Process] = ()
) -> None:
    """Nothing of the job runs any more: it is parked, its work on the GPU drained and locked, its other processes stopped.

    `nccl`: processes that build communicators on the target before anything of the job runs there; they are parked as well,
    with CUDA or without. If it fails the rank is somewhere in between, and `bring_back` is the way back from there.
    """
    parking = parked_ones(processes, nccl)
    if not parking:
        return
    await still(gpus, processes, parking, parts)
    await stop_others(group, parking)


async def stop_others(group: Cgroup, parking: Iterable[Process]) -> None:
    """The processes of the rank that are not parked are stopped, also those that were forked a moment ago."""
    await in_thread(tree.stop_all, _Others(group, parking), STOP_S)


async def still(gpus: Gpus, processes: Sequence[Process], parking: Sequence[Process], parts: Parts) -> None:
    """The work of `processes` on the GPU is drained and locked, and the threads of `parking` are parked.

    Parked first, outside the driver. A thread that waits at the driver's lock has a share of it as soon as that is opened,
    parked or not, and whoever wants the lock alone then waits for ever. Only where the threads do not leave the driver, or
    the driver waits for one that was parked in it after all, are they locked out first.
    """
    try:
        await _park(parking, parts, LOCK_S, outside_driver=True)
        if not processes:
            return
        await reach(Point.PARKED)
        try:
            await _lock(gpus, processes, parts)
        except Timeout as error:  # one of them is in its way, or the GPU is busy
            raise InDriver(error.message, where=error.where) from error
    except InDriver as error:
        if not processes:
            raise
        log.info("locked before they are parked: %s", error.message)
        await let_go(parking)
        await _lock(gpus, processes, parts)
        await _park(parking, parts, PARK_S)
    await each(processes, lambda process: in_thread(_must_not_share, process))
    await reach(Point.LOCKED)


def _must_not_share(process: Process) -> None:
    """Preflight has looked, and the job ran on. What two processes share would be two memories afterwards."""
    state = _mailbox(process).state()
    if state.exports or state.imports:
        raise GpuFailed(
            f"process {process.pid} has begun to share device memory (CUDA IPC) since it was looked at: {state.exports}"
            f" handles given out, {state.imports} opened",
            remedy="`migrator check` tells when it can move",
            where=Where.SOURCE_FROZEN,
        )


async def _park(parking: Sequence[Process], parts: Parts, limit_s: float, *, outside_driver: bool = False) -> None:
    def park(process: Process) -> None:
        _mailbox(process).park(limit_s, outside_driver=outside_driver)

    await parts.time("park", each(parking, lambda process: in_thread(park, process)))


async def _lock(gpus: Gpus, processes: Sequence[Process], parts: Parts) -> None:
    await parts.time("lock", each(processes, lambda process: gpus.lock(process, LOCK_S)))


async def take_off(
    gpus: Gpus,
    processes: Sequence[Process],
    expected: Mapping[str, int],
    parts: Parts,
    note: Callable[[dict[str, int]], Awaitable[None]],
    park: Callable[[], Awaitable[int]],
) -> int:
    """Device memory of the held processes goes into host memory: first what `park` can move, which says how many bytes that
    were, then the rest by the driver. Returns the bytes of both.

    An undo, perhaps of the daemon's next life, must know how much has to go back to which GPU: `note` is given it by UUID,
    before it is needed. As the driver tells it of these processes now; where it tells none, as `expected` by preflight,
    and then by how much more is free when it is done.
    """
    if not processes:
        return 0
    before = await gpus.inventory(fresh=True)
    told = _told(before, processes)
    uses = told or dict(expected)
    await note(uses)
    limit_s = copy_s(total(uses))
    parked_bytes = await park()
    rest_bytes = max(0, total(uses) - parked_bytes)
    await parts.time("checkpoint", each(processes, lambda process: gpus.checkpoint(process, limit_s)), rest_bytes)
    after = await gpus.inventory(fresh=True)  # also for whoever asks next, who sees this rank off its GPU
    if not told and (grown := _grown(before, after)):
        uses = grown
        parts.all[-1].bytes = max(0, total(uses) - parked_bytes)
        await note(uses)
    await reach(Point.CHECKPOINTED)
    return total(uses)


def total(uses: Mapping[str, int]) -> int:
    """Bytes of device memory of a rank that holds CUDA; a context alone is more than nothing."""
    return sum(uses.values()) or CONTEXT_BYTES


def _told(inventory: Inventory, processes: Iterable[Process]) -> dict[str, int]:
    """By UUID; empty where the driver does not tell all."""
    pids, found = {process.pid for process in processes}, {}
    for card in inventory.gpus:
        mine = [process.memory_bytes for process in card.processes if process.pid in pids]
        if not all(mine):
            return {}
        if mine:
            found[card.uuid] = sum(mine)
    return found


def _grown(before: Inventory, after: Inventory) -> dict[str, int]:
    """By UUID, how much more is free than before."""
    free = {card.uuid: card.memory_free_bytes for card in before.gpus}
    more = {card.uuid: card.memory_free_bytes - free.get(card.uuid, card.memory_free_bytes) for card in after.gpus}
    return {uuid: size for uuid, size in more.items() if size > 0}


def parked_ones(cuda: Iterable[Process], nccl: Iterable[Process]) -> list[Process]:
    return sorted({*cuda, *nccl})


async def bring_back(
    gpus: Gpus,
    processes: Sequence[Process],
    needs: Mapping[str, int],
    device_bytes: int,
    nccl: Iterable[Process] = (),
    refill: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Undo on the source, whose processes run again: device memory back on the GPU it came from, then the job's threads.

    `needs`: the bytes on each GPU, by UUID. `refill`: puts back what is in stripes. GpuFailed, Timeout: not all of it is
    back; try again later. Lost: never.
    """
    alive = [process for process in processes if process.alive()]
    try:
        await _back_on_the_gpu(gpus, alive, needs, device_bytes)
        if refill is not None:
            await refill()
        if alive:
            # Communicators are built next, and which ranks share a GPU is asked for that.
            await gpus.inventory(fresh=True)
    except Timeout:
        # A driver's thread may wait for a lock that a parked thread holds, for as long as that is parked. ABORT stands, so
        # the copy here is the only one that ever runs: its threads may go on, those that use the GPU wait in the driver,
        # and the next try finds the way free. Not those whose memory is out: they would find none.
        with contextlib.suppress(SnapshotError):
            await let_go([process for process in alive if not await in_thread(devmem.is_out, process)])
        raise
    await let_go([process for process in parked_ones(alive, nccl) if process.alive()])
    if refill is not None:
        with contextlib.suppress(SnapshotError):  # a call that a parked thread held up: what it was made with goes now
            await refill()


async def _back_on_the_gpu(
    gpus: Gpus, processes: Sequence[Process], needs: Mapping[str, int], device_bytes: int
) -> None:
    # It answers when a copy under way is done.
    states = {process: await gpus.state(process, copy_s(device_bytes)) for process in processes}
    if State.CHECKPOINTED in states.values():
        await _await_room(gpus, needs, states)
    for process, state in states.items():
        if state is State.FAILED:
            raise Lost(f"the CUDA driver lost the device memory of process {process.pid} (state FAILED)")
        if state is State.CHECKPOINTED:
            await _restore_here(gpus, process, device_bytes)
        if state is not None and state is not State.RUNNING:
            await gpus.unlock(process, LOCK_S)


async def _await_room(gpus: Gpus, needs: Mapping[str, int], states: Mapping[Process, State | None]) -> None:
    """A restore that fails for want of device memory is the last: the driver refuses every further one (seen with r580). So
    it is not tried before there is room, which for some is what they still have, or have again."""
    inventory = await gpus.inventory(fresh=True)
    cards = {card.uuid: card for card in inventory.gpus}
    there = {process.pid for process, state in states.items() if state is not State.CHECKPOINTED}
    for uuid, need_bytes in needs.items():
        card = cards.get(uuid)
        if card is None:
            raise GpuFailed(
                f"{need_bytes >> 20} MiB of device memory have to go back to GPU {uuid}, and nobody can tell whether there"
                f" is room: {inventory.problem or 'the driver does not name it'}",
                remedy="see `nvidia-smi` on this node: the rank goes on as soon as the GPU is told of again",
                where=Where.SOURCE_FROZEN,
            )
        own_bytes = sum(process.memory_bytes for process in card.processes if process.pid in there)
        own_bytes = own_bytes or need_bytes * len(there) // len(states)  # where the driver tells no processes
        if card.memory_free_bytes + own_bytes < need_bytes:
            others = ", ".join(str(process.pid) for process in card.processes) or "none that the driver tells"
            raise GpuFailed(
                f"{need_bytes >> 20} MiB of device memory have to go back to GPU {card.index} ({card.uuid}), and "
                f"{card.memory_free_bytes >> 20} MiB are free there; processes on it: {others}",
                remedy="end or move what took the memory meanwhile: the rank goes on as soon as there is room",
                where=Where.SOURCE_FROZEN,
            )


async def _restore_here(gpus: Gpus, process: Process, device_bytes: int) -> None:
    try:
        await gpus.restore(process, (), copy_s(device_bytes))
    except GpuFailed as error:
        if "CUDA_ERROR_OPERATING_SYSTEM" in error.message:
            raise Lost(f"the CUDA driver does not give the device memory back: {error.message}") from error
        raise


async def revive(
    gpus: Gpus,
    processes: Sequence[Process],
    group: Cgroup,
    pairs: Sequence[Pair],
    device_bytes: int,
    parts: Parts,
    refill: Callable[[], Awaitable[None]],
) -> None:
    """On the target, after criu: device memory onto this node's GPU, under the parked threads. Then all stands still again.

    `device_bytes`: of what the driver carries; `refill` puts back what is in stripes. The tree is stopped and frozen before
    and after; in between only the driver's and the shim's threads run.
    """
    if not processes:
        return
    await each(processes, lambda process: in_thread(_must_be_parked, process))
    await in_thread(group.thaw, STOP_S)  # everything is stopped by signal as well
    for process in processes:
        process.signal(signal.SIGCONT)
    limit_s = copy_s(device_bytes)
    await parts.time(
        "cuda-restore", each(processes, lambda process: gpus.restore(process, pairs, limit_s)), device_bytes
    )
    await reach(Point.CUDA_RESTORED)
    await parts.time("unlock", each(processes, lambda process: gpus.unlock(process, LOCK_S)))
    await refill()
    await gpus.inventory(fresh=True)  # whoever asks next sees this rank on its GPU
    await in_thread(tree.stop_again, processes, STOP_S)
    await in_thread(group.freeze, STOP_S)


def _must_be_parked(process: Process) -> None:
    mailbox = shimctl.find(process)
    if mailbox is None or not mailbox.state().parked:
        raise GpuFailed(
            f"the threads of the restored process {process.pid} are not parked: it stays stopped",
            remedy="the job goes on at its source; `migrator check` names threads that cannot be parked",
            where=Where.SOURCE_FROZEN,
        )


async def let_go(processes: Sequence[Process]) -> None:
    """The job's threads go on where they were parked. The processes must run. Repeatable."""
    await each(processes, lambda process: in_thread(_release, process))


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
        return  # it ended, as a child may: the others go on


def parked(processes: Iterable[Process]) -> bool:
    """Whether the threads of one of them are still held. Blocking."""
    mailboxes = [shimctl.find(process) for process in processes if process.alive()]
    return any(mailbox is not None and mailbox.state().parked for mailbox in mailboxes)


def _mailbox(process: Process) -> shimctl.Mailbox:
    mailbox = shimctl.find(process)
    if mailbox is None:
        raise GpuFailed(
            f"the shim is not at work in process {process.pid}",
            remedy="start the job with `migrator run`; a program that is linked statically cannot be moved",
            where=Where.SOURCE_RUNNING,
        )
    return mailbox


def copy_s(device_bytes: int) -> float:
    return COPY_S + COPY_GIB_S * device_bytes / 2**30


async def each(processes: Sequence[Process], act: Callable[[Process], Awaitable[Any]]) -> list[Any]:
    """The same for every process at once. All are waited for, then the first failure is raised."""
    results = await asyncio.gather(*(act(process) for process in processes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
