"""Device memory that processes of a rank share (CUDA IPC) moves with the rank.

The CUDA driver restores no process that has memory of another one. So the processes that have opened memory close it when
the rank is at a standstill, before its owner's memory leaves the GPU, and open it again after the owner has it back: on the
target, and here when a move is undone or a snapshot goes on. They find what the owner has then, at the same addresses.

Invariant: nothing is closed before every process that shares has tried the calls that follow, because a process whose memory
is closed cannot be released for a moment. While some is closed, no thread of the rank's CUDA processes runs: one could free
what another one has closed, or open more. Every operation can be repeated: the processes are asked what is left to do;
nothing is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Where
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess import sharing
from snapshotd.inprocess.devmem import Caught
from snapshotd.inprocess.sharing import OwnerGone, Shared
from snapshotd.inprocess.shimctl import ShimState
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.device import standstill
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts, each
from snapshotd.moves.device.standstill import LOCK_S
from snapshotd.preflight import shared_memory
from snapshotd.preflight.verdict import listed
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: A thread that was parked inside a call soon leaves it.
TRIES, AGAIN_S = 3, 0.01


@contextlib.contextmanager
def _unless_ended(process: Process) -> Iterator[None]:
    """A process that has ended shares nothing any more. One that is there and cannot be asked is another matter."""
    try:
        yield
    except RankGone:
        if process.alive():
            raise


def _sharers(processes: Iterable[Process]) -> list[Shared]:
    """Those of these processes that share something. Blocking."""
    found = []
    for process in processes:
        with _unless_ended(process):
            one = sharing.find(process) if process.alive() else None
            if one is not None and ((state := one.state()).exports or state.imports or state.shared_closed):
                found.append(one)
    return found


def _refused(reason: str, where: Where = Where.SOURCE_FROZEN, remedy: str = "") -> GpuFailed:
    return GpuFailed(
        f"gpu-ipc: {reason}", remedy=remedy or "run `migrator check` to see when the rank can move", where=where
    )


async def attempt(processes: Sequence[Process], *, known: bool) -> None:
    """While the job runs: finds out whether what is shared can be closed and opened. Raises GpuFailed. `known`: the preflight
    has found that this rank shares memory, and that all nodes concerned can move it."""
    if not known:
        return  # what it has begun to share since is found in the freeze
    for one in await in_thread(_sharers, processes):
        try:
            await in_thread(one.attempt)
        except OwnerGone as error:
            raise _refused(error.message, Where.SOURCE_RUNNING) from error
        except Caught as error:
            log.info("process %d: %s", one.process.pid, error)
        except RankGone:
            if one.process.alive():
                raise
        except GpuFailed as error:
            await in_thread(_must_last, processes)
            raise _refused(error.message, Where.SOURCE_RUNNING) from error
    await in_thread(_must_last, processes)


def _must_last(processes: Sequence[Process]) -> None:
    stuck, _ = shared_memory.lasting(lambda: _states(_sharers(processes)))
    if stuck is not None:
        raise _refused(stuck.reason, Where.SOURCE_RUNNING, stuck.remedy)


def _states(sharers: Iterable[Shared]) -> list[tuple[str, ShimState]]:
    found = []
    for one in sharers:
        with _unless_ended(one.process):
            found.append((f"process {one.process.pid}", one.state()))
    return found


async def must_leave_in_stripes(processes: Sequence[Process], striped: Iterable[Process], why: str) -> None:
    """While the job runs, when offloading is prepared: the driver's checkpoint does not carry memory that is shared.
    `striped`: those whose memory is offloaded, or kept on its GPU. Raises GpuFailed."""
    leaving = set(striped)

    def check() -> None:
        for one in _sharers(processes):
            with _unless_ended(one.process):
                if one.state().exports and one.process not in leaving:
                    text = f"process {one.process.pid} shares device memory, which cannot be offloaded"
                    remedy = "the preflight's gpu-device-memory and gpu-offload-room say what offloading needs"
                    raise _refused(f"{text}: {why}" if why else text, Where.SOURCE_RUNNING, remedy)

    await in_thread(check)


async def close(
    gpus: Gpus,
    processes: Sequence[Process],
    others: Sequence[RankEntry],
    parts: Parts,
    stop_others: Callable[[], Awaitable[None]],
    *,
    known: bool,
) -> None:
    """The processes are at a standstill before and after. `others`: other ranks on this node. `stop_others` stops processes
    that one of them has forked while its threads were released. `known`: as of `attempt`. Raises GpuFailed; the undo opens
    what was closed."""
    sharers = await in_thread(_sharers, processes)
    if not sharers:
        return
    if not known:
        counts = [
            f"{name}: {state.exports} handles exported, {state.imports} opened" for name, state in _states(sharers)
        ]
        raise _refused(f"the rank has begun to share device memory (CUDA IPC) since preflight: {listed(counts)}")
    caught: list[Shared] = []
    for again in range(TRIES):
        if again:  # all of them: what one frees meanwhile, another one may have open, and has tried in vain
            released = [one.process for one in sharers]
            await standstill.let_go(released)
            await asyncio.sleep(AGAIN_S)
            await standstill.still(gpus, released, released, parts)
            await stop_others()
            sharers = await in_thread(_sharers, processes)
        await each([one.process for one in sharers], lambda process: gpus.unlock(process, LOCK_S))
        caught = [one for one in sharers if not await in_thread(_tried, one)]
        if not caught:
            break
    else:
        pids = ", ".join(str(one.process.pid) for one in caught)
        raise _refused(f"{TRIES} times in a row threads of process {pids} were in the middle of a call into CUDA")
    await in_thread(_must_move, sharers, others)
    await parts.time("close-shared", all_at_once(_close, sharers))
    await reach(Point.SHARED_CLOSED)
    await each([one.process for one in sharers], lambda process: gpus.lock(process, LOCK_S))


def _tried(one: Shared) -> bool:
    try:
        with _unless_ended(one.process):
            one.attempt()
    except Caught as caught:
        log.info("releasing threads to try again: process %d: %s", one.process.pid, caught)
        return False
    except OwnerGone as error:
        raise _refused(error.message) from error
    except GpuFailed as error:
        raise _refused(error.message) from error
    return True


def _close(one: Shared) -> None:
    with _unless_ended(one.process):
        one.close()


def _must_move(sharers: Sequence[Shared], others: Iterable[RankEntry]) -> None:
    """Preflight has checked this, but the job kept running. Memory that two processes share would become two copies. From
    here on processes of other ranks get nothing."""
    states = _states(sharers)
    if (stuck := shared_memory.why_not(states)) is not None:
        raise _refused(f"since preflight it was found that {stuck.reason}", remedy=stuck.remedy)
    servers = {state.server for _, state in states if state.exports}
    for entry in others if servers else ():
        for pid in entry.group.pids():
            if servers & _opened_from(pid):
                raise _refused(f"process {pid} of rank {entry.rank} has opened device memory of this rank")


def _opened_from(pid: int) -> set[int]:
    """Nothing of a process without a shim, which could not have opened it."""
    with contextlib.suppress(SnapshotError, ProcessLookupError, FileNotFoundError):
        guest = sharing.find(Process.of(pid))
        return set(guest.state().opened_from) if guest is not None else set()
    return set()


async def must_be_out(processes: Sequence[Process]) -> None:
    """Before the driver's checkpoint: raises GpuFailed if it would have to carry memory that is shared."""

    def check() -> None:
        for one in _sharers(processes):
            with _unless_ended(one.process):
                state = one.state()
                if state.imports and not state.imports_closed:
                    raise _refused(f"process {one.process.pid} has device memory of other processes open (CUDA IPC)")
                if state.exports and not state.device_offloaded:
                    raise _refused(
                        f"process {one.process.pid} shares device memory with others (CUDA IPC), and it could not be"
                        " offloaded"
                    )

    await in_thread(check)


async def must_stay_parked(processes: Sequence[Process]) -> None:
    """Raises GpuFailed if some of these processes, all of a rank, share memory. It is closed, and none of them may run for
    a moment: it could free what another one has to open again, or open what it could not close."""
    if sharers := await in_thread(_sharers, processes):
        pids = ", ".join(str(one.process.pid) for one in sharers)
        raise _refused(f"a thread is in the middle of a call into CUDA, while what process {pids} shares is closed")


def close_again(processes: Sequence[Process]) -> None:
    """An owner's memory is about to be replaced, in an undo that is repeated: closes what was opened meanwhile. Blocking.
    Where threads run nothing is closed, and no memory is replaced."""
    for one in _sharers(processes):
        with _unless_ended(one.process):
            if (state := one.state()).parked and state.imports:
                one.close()


def reopen(processes: Sequence[Process]) -> None:
    """All owners have their memory back. Blocking. Idempotent. Raises GpuFailed or Timeout: retry later; Lost: what a process
    has open had an owner that has ended."""
    sharers = _sharers(processes)
    for one in sharers:
        with _unless_ended(one.process):
            if one.state().shared_closed:
                one.offer()
    for one in sharers:
        with _unless_ended(one.process):
            if one.state().shared_closed:
                _open(one, sharers)


def _open(one: Shared, sharers: Sequence[Shared]) -> None:
    try:
        one.open()
    except OwnerGone as error:
        servers = {state.server for _, state in _states(sharers)}
        if set(one.state().opened_from) <= servers:
            raise
        raise Lost(f"device memory that process {one.process.pid} shares is gone: its owner has ended") from error
