"""Takes device memory off the GPU before the freeze, and puts it back on the node that may run the rank.

The processes are brought to a standstill first (snapshotd/moves/device/standstill.py). Then memory is offloaded
(snapshotd/moves/device/offload.py), and the driver's checkpoint takes the rest. On the target the order is reversed.

Invariant: every operation can be repeated: the driver is asked what is left to do; nothing is remembered.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout, Where
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.cuda.inventory import Inventory
from snapshotd.inprocess import devmem, shimctl
from snapshotd.inprocess.shimctl import Emptied
from snapshotd.moves.device.parts import Parts, each
from snapshotd.moves.device.standstill import LOCK_S, STOP_S, let_go, must_be_parked, parked_ones
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

#: How long the interpreter may take to reach a point where the caching allocator can be emptied; the job runs meanwhile.
EMPTY_CACHE_S = 1.0
#: Time limit of a checkpoint or a restore: a fixed part, and a part for every GiB of device memory.
COPY_S, COPY_GIB_S = 30.0, 4.0
#: Approximate size of a CUDA context on a GPU before the job has allocated anything.
CONTEXT_BYTES = 512 << 20


class Lost(Exception):
    """The driver has lost a process's device memory: it can never run again."""


async def empty_caches(processes: Sequence[Process], parts: Parts) -> Emptied:
    """Returns the caching allocators' free blocks to the driver, and ends idle compilers; the rank keeps running. The bytes
    are None if no process could do it, say because its interpreter has reached no safe point in time. Never raises."""
    if not processes:
        return Emptied()
    given = await parts.time("empty-cache", each(processes, lambda process: in_thread(_empty_cache, process)))
    freed = [one.released_bytes for one in given if one.released_bytes is not None]
    parts.all[-1].bytes = sum(freed)
    return Emptied(sum(freed) if freed else None, sum(one.pools_told for one in given))


def _empty_cache(process: Process) -> Emptied:
    try:
        mailbox = shimctl.find(process)
        return mailbox.empty_cache(EMPTY_CACHE_S) if mailbox is not None else Emptied()
    except SnapshotError:  # a child that ends meanwhile has no cache
        return Emptied()


async def take_off(
    gpus: Gpus,
    processes: Sequence[Process],
    expected: Mapping[str, int],
    parts: Parts,
    journal: Callable[[dict[str, int]], Awaitable[None]],
    offload: Callable[[], Awaitable[int]],
) -> int:
    """Moves device memory of processes at a standstill into host memory: first what `offload` can move, which returns the
    bytes, then the rest by the driver's checkpoint. Returns the bytes of both.

    An undo, perhaps after a restart, must know how much has to go back to which GPU: `journal` gets the bytes by UUID before
    they are needed. They are what the driver reports for these processes now. If it reports nothing, they are what preflight
    `expected`, and afterwards the increase of free memory.
    """
    if not processes:
        return 0
    before = await gpus.inventory(fresh=True)
    reported = _reported(before, processes)
    uses = reported or dict(expected)
    await journal(uses)
    limit_s = copy_s(total(uses))
    offloaded_bytes = await offload()
    rest_bytes = max(0, total(uses) - offloaded_bytes)
    await parts.time("checkpoint", each(processes, lambda process: gpus.checkpoint(process, limit_s)), rest_bytes)
    after = await gpus.inventory(fresh=True)  # the next caller must see this rank off its GPU
    if not reported and (grown := _grown(before, after)):
        uses = grown
        parts.all[-1].bytes = max(0, total(uses) - offloaded_bytes)
        await journal(uses)
    await reach(Point.CHECKPOINTED)
    return total(uses)


def total(uses: Mapping[str, int]) -> int:
    """Bytes of device memory of a rank that holds CUDA; never 0, because a context takes some."""
    return sum(uses.values()) or CONTEXT_BYTES


def _reported(inventory: Inventory, processes: Iterable[Process]) -> dict[str, int]:
    """By UUID; empty where the driver does not report all of them."""
    pids, found = {process.pid for process in processes}, {}
    for card in inventory.gpus:
        mine = [process.memory_bytes for process in card.processes if process.pid in pids]
        if not all(mine):
            return {}
        if mine:
            found[card.uuid] = sum(mine)
    return found


def _grown(before: Inventory, after: Inventory) -> dict[str, int]:
    """By UUID: the increase of free memory."""
    free = {card.uuid: card.memory_free_bytes for card in before.gpus}
    more = {card.uuid: card.memory_free_bytes - free.get(card.uuid, card.memory_free_bytes) for card in after.gpus}
    return {uuid: size for uuid, size in more.items() if size > 0}


async def bring_back(
    gpus: Gpus,
    processes: Sequence[Process],
    needs: Mapping[str, int],
    device_bytes: int,
    nccl: Iterable[Process] = (),
    refill: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Undo on the source, whose processes run again: puts device memory back on its GPU, then releases the job's threads.

    `needs`: the bytes on each GPU, by UUID. `refill`: puts offloaded memory back. Raises GpuFailed or Timeout when not all
    of it is back yet (retry later), Lost when it never will be.
    """
    alive = [process for process in processes if process.alive()]
    try:
        with span("back on the GPU"):
            await _back_on_the_gpu(gpus, alive, needs, device_bytes)
        if refill is not None:
            with span("give memory back"):
                await refill()
        if alive:
            # Communicators are built next, which depends on which ranks share a GPU.
            with span("list GPUs"):
                await gpus.inventory(fresh=True)
    except Timeout:
        # A driver's thread may wait for a lock that a parked thread holds. ABORT stands, so the copy here is the only one
        # that ever runs: its threads may run, those that use the GPU wait in the driver, and the next attempt succeeds.
        # Threads whose memory is offloaded stay parked: their memory is not there. So do all while some memory that they
        # share is closed: an owner could free what another process has to open again.
        with contextlib.suppress(SnapshotError):
            if not await in_thread(_some_is_closed, alive):
                await let_go([process for process in alive if not await in_thread(devmem.is_out, process)])
        raise
    await let_go([process for process in parked_ones(alive, nccl) if process.alive()])
    if refill is not None:
        with contextlib.suppress(SnapshotError):  # a parked thread blocked the call: gives up what was prepared
            await refill()


def _some_is_closed(processes: Iterable[Process]) -> bool:
    """Whether something that these processes share is not open again. Blocking."""
    found = [shimctl.find(process) for process in processes if process.alive()]
    return any(mailbox is not None and mailbox.state().shared_closed for mailbox in found)


async def _back_on_the_gpu(
    gpus: Gpus, processes: Sequence[Process], needs: Mapping[str, int], device_bytes: int
) -> None:
    # The driver answers once a copy in progress is done.
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
    """Raises GpuFailed until there is room for a restore. After one that fails for lack of device memory the driver refuses
    every further one (seen with r580). Processes that still have their memory need no room."""
    inventory = await gpus.inventory(fresh=True)
    cards = {card.uuid: card for card in inventory.gpus}
    there = {process.pid for process, state in states.items() if state is not State.CHECKPOINTED}
    for uuid, need_bytes in needs.items():
        card = cards.get(uuid)
        if card is None:
            raise GpuFailed(
                f"{need_bytes >> 20} MiB of device memory have to go back to GPU {uuid}, and it is unknown whether there"
                f" is room: {inventory.problem or 'the driver does not list this GPU'}",
                remedy="see `nvidia-smi` on this node; the rank continues as soon as the driver lists the GPU again",
                where=Where.SOURCE_FROZEN,
            )
        own_bytes = sum(process.memory_bytes for process in card.processes if process.pid in there)
        own_bytes = own_bytes or need_bytes * len(there) // len(states)  # where the driver reports no processes
        if card.memory_free_bytes + own_bytes < need_bytes:
            others = ", ".join(str(process.pid) for process in card.processes) or "none that the driver reports"
            raise GpuFailed(
                f"{need_bytes >> 20} MiB of device memory have to go back to GPU {card.index} ({card.uuid}), and "
                f"{card.memory_free_bytes >> 20} MiB are free there; processes on it: {others}",
                remedy="end or move the processes that took the memory; the rank continues as soon as there is room",
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
    """On the target, after criu: puts device memory onto this node's GPU, while the job's threads stay parked.

    `device_bytes`: what the driver carries; `refill` puts offloaded memory back. The tree is stopped and frozen before and
    after; in between only the driver's and the shim's threads run.
    """
    if not processes:
        return
    await each(processes, lambda process: in_thread(must_be_parked, process))
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
    await gpus.inventory(fresh=True)  # the next caller must see this rank on its GPU
    await in_thread(tree.stop_again, processes, STOP_S)
    await in_thread(group.freeze, STOP_S)


def copy_s(device_bytes: int) -> float:
    return COPY_S + COPY_GIB_S * device_bytes / 2**30
