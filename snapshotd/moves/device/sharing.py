"""Device memory that processes of a rank share (CUDA IPC) moves with the rank.

The CUDA driver restores no process that has memory of another one. So the processes that have opened memory close it when
the rank is at a standstill, before its owner's memory leaves the GPU, and open it again after the owner has it back: on the
target, and here when a move is undone or a snapshot goes on. They find what the owner has then, at the same addresses.

Invariant: nothing is closed before every process that shares has tried the calls that follow, because a process whose memory
is closed cannot be released for a moment. While some is closed, no thread of the processes concerned runs. Every operation
can be repeated: the processes are asked what is left to do; nothing is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Where
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess import sharing
from snapshotd.inprocess.devmem import Caught
from snapshotd.inprocess.sharing import OwnerGone, Shared
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.device import standstill
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts, each
from snapshotd.moves.device.standstill import LOCK_S
from snapshotd.preflight import shared_memory
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: A thread that was parked inside a call soon leaves it.
TRIES, AGAIN_S = 3, 0.01


def _sharers(processes: Iterable[Process]) -> list[Shared]:
    """Those of these processes that share something. Blocking."""
    found = []
    for process in processes:
        with contextlib.suppress(RankGone):
            one = sharing.find(process) if process.alive() else None
            if one is not None and ((state := one.state()).exports or state.imports or state.shared_closed):
                found.append(one)
    return found


def _refused(reason: str, where: Where = Where.SOURCE_FROZEN) -> GpuFailed:
    return GpuFailed(f"gpu-ipc: {reason}", remedy=shared_memory.REMEDY, where=where)


async def attempt(processes: Sequence[Process]) -> None:
    """While the job runs: finds out whether what is shared can be closed and opened. Raises GpuFailed."""
    for one in await in_thread(_sharers, processes):
        try:
            await in_thread(one.attempt)
        except OwnerGone as error:
            raise _refused(error.message, Where.SOURCE_RUNNING) from error
        except GpuFailed as error:  # a library that does not know how; what it shares may still be closed by the job
            log.info("process %d cannot close what it shares: %s", one.process.pid, error.message)
        except (Caught, RankGone) as error:
            log.info("process %d: %s", one.process.pid, error)


async def close(
    gpus: Gpus,
    processes: Sequence[Process],
    others: Sequence[RankEntry],
    parts: Parts,
    stop_others: Callable[[], Awaitable[None]],
) -> None:
    """The processes are at a standstill before and after. `others`: other ranks on this node. `stop_others` stops processes
    that one of them has forked while its threads were released. Raises GpuFailed; the undo opens what was closed."""
    sharers = await in_thread(_sharers, processes)
    if not sharers:
        return
    left = list(sharers)
    for again in range(TRIES):
        if again:
            caught = [one.process for one in left]
            await standstill.let_go(caught)
            await asyncio.sleep(AGAIN_S)
            await standstill.still(gpus, caught, caught, parts)
            await stop_others()
        await each([one.process for one in left], lambda process: gpus.unlock(process, LOCK_S))
        left = [one for one in left if not await in_thread(_tried, one)]
        if not left:
            break
    if left:
        pids = ", ".join(str(one.process.pid) for one in left)
        raise _refused(f"{TRIES} times in a row threads of process {pids} were in the middle of a call into CUDA")
    await in_thread(_must_move, sharers, others)
    await parts.time("close-shared", all_at_once(_close, sharers))
    await reach(Point.SHARED_CLOSED)
    await each([one.process for one in sharers], lambda process: gpus.lock(process, LOCK_S))


def _tried(one: Shared) -> bool:
    try:
        one.attempt()
    except Caught as caught:
        log.info("releasing threads to try again: process %d: %s", one.process.pid, caught)
        return False
    except OwnerGone as error:
        raise _refused(error.message) from error
    except GpuFailed as error:
        if reason := shared_memory.why_not([(f"process {one.process.pid}", one.state())]):
            raise _refused(f"since preflight it was found that {reason}") from error
        raise
    except RankGone:
        pass
    return True


def _close(one: Shared) -> None:
    with contextlib.suppress(RankGone):
        one.close()


def _must_move(sharers: Sequence[Shared], others: Iterable[RankEntry]) -> None:
    """Preflight has checked this, but the job kept running. Memory that two processes share would become two copies."""
    states = []
    for one in sharers:
        with contextlib.suppress(RankGone):
            states.append((f"process {one.process.pid}", one.state()))
    if reason := shared_memory.why_not(states):
        raise _refused(f"since preflight it was found that {reason}")
    servers = {state.server for _, state in states if state.exports}
    for entry in others if servers else ():
        for pid in entry.group.pids():
            if servers & _opened_from(pid):
                raise _refused(f"process {pid} of rank {entry.rank} has opened device memory of this rank")


def _opened_from(pid: int) -> set[int]:
    with contextlib.suppress(SnapshotError, ProcessLookupError, FileNotFoundError):
        guest = sharing.find(Process.of(pid))
        return set(guest.state().opened_from) if guest is not None else set()
    return set()


async def must_be_out(processes: Sequence[Process]) -> None:
    """Before the driver's checkpoint: raises GpuFailed if it would have to carry memory that is shared."""

    def check() -> None:
        for one in _sharers(processes):
            state = one.state()
            if state.exports and not state.device_offloaded:
                raise _refused(
                    f"process {one.process.pid} shares device memory with others (CUDA IPC), and it could not be offloaded"
                )

    await in_thread(check)


async def must_stay_parked(processes: Sequence[Process]) -> None:
    """Raises GpuFailed if one of these processes shares memory: what the others have of it is closed, and could not be opened
    if it were freed now."""
    if sharers := await in_thread(_sharers, processes):
        pids = ", ".join(str(one.process.pid) for one in sharers)
        raise _refused(f"threads of process {pids}, which shares memory, are in the middle of a call into CUDA")


def close_again(processes: Sequence[Process]) -> None:
    """An owner's memory is about to be replaced, in an undo that is repeated: closes what was opened meanwhile. Blocking.
    Where threads run nothing is closed, and no memory is replaced."""
    for one in _sharers(processes):
        with contextlib.suppress(RankGone):
            if (state := one.state()).parked and state.imports:
                one.close()


def reopen(processes: Sequence[Process]) -> None:
    """All owners have their memory back. Blocking. Idempotent. Raises GpuFailed or Timeout: retry later; Lost: what a process
    has open had an owner that has ended."""
    sharers = _sharers(processes)
    for one in sharers:
        with contextlib.suppress(RankGone):
            if one.state().shared_closed:
                one.offer()
    for one in sharers:
        with contextlib.suppress(RankGone):
            if one.state().shared_closed:
                _open(one, sharers)


def _open(one: Shared, sharers: Sequence[Shared]) -> None:
    try:
        one.open()
    except OwnerGone as error:
        servers = {other.state().server for other in sharers if other.process.alive()}
        if set(one.state().opened_from) <= servers:
            raise
        raise Lost(f"device memory that process {one.process.pid} shares is gone: its owner has ended") from error
