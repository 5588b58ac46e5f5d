"""Copies device memory from stripes back to a GPU: on the target while they arrive, on the source when a move is undone.

The driver is unlocked and the job's threads are parked: the shim's own threads map fresh memory at the old addresses and
copy. Invariant: a process whose memory is not back stays parked. On the target memory counts as back only once every stripe
is verified to be what the source sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api.errors import Damaged, GpuFailed, RankGone, SnapshotError, Timeout, Unreachable, Where
from snapshotd.holder.client import Holder
from snapshotd.inprocess import devmem
from snapshotd.inprocess import sharing as shared
from snapshotd.inprocess.devmem import DeviceMemory
from snapshotd.moves.device import hold, sharing, stripe_files
from snapshotd.moves.device.fills import Fills
from snapshotd.moves.device.memory import Lost, copy_s
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.device.takeover import TakeOver
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.record_parts import OffloadedMemory, StripedProcess
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.transport.device.incoming import Incoming

log = logging.getLogger(__name__)

#: Time limit for stripes that are being sent: a fixed part, and a part for every GiB.
ARRIVE_S, ARRIVE_GIB_S = 60.0, 20.0

CANCEL_AGAIN_S = 0.05


async def on_source(image_dir: Path, move_log: MoveLog, holder: Holder) -> None:
    """Undo: brings offloaded memory back, and gives up what was only prepared. Idempotent. Raises GpuFailed: retry later.

    A failure that does not concern offloaded memory is only logged: the rank must continue."""
    folder = stripe_files.folder_of(image_dir, move_log.move)
    known = move_log.record
    limit_s = copy_s(known.offloaded_bytes or known.device_bytes)

    def back(one: StripedProcess) -> None:
        try:
            bring(one)
        except RankGone:
            log.info("process %d has ended: no device memory has to come back to it", one.pid)

    def replaces(one: StripedProcess) -> bool:
        """Whether it gets other memory than it has."""
        try:
            return one.process.alive() and (devmem.is_out(one.process) or gets_its_own(one))
        except RankGone:
            return False

    def gets_its_own(one: StripedProcess) -> bool:
        """What another rank has opened meanwhile would not be this one's memory any more."""
        return hold.imports(one.process) and not shared.is_outside(one.process)

    def make_own(one: StripedProcess) -> None:
        if not one.taken_over:  # there may be no room for a copy while the target has it, too: with the next move
            hold.own(one.process, len(one.stripes), one.slot_bytes, limit_s)

    def bring(one: StripedProcess) -> None:
        process = one.process
        memory = devmem.find(process) if process.alive() else None
        if memory is None:
            return
        memory.cancel()  # a command from before a restart of this daemon
        if not memory.offloaded():
            _drop(memory)
            if one.held and gets_its_own(one):
                # Not its own, because a daemon was killed in between. What is still kept of it needs the room.
                holder.drop([hold.key_of(move_log.move, process)])
                make_own(one)
            return
        if one.held:
            size = hold.take_back(holder, move_log.move, one, limit_s)
            log.info("process %d: %d bytes of device memory were handed back", process.pid, size)
            make_own(one)
            return
        try:
            with stripe_files.opened(folder, one.stripes, os.O_RDONLY) as fds:
                memory.ready(fds, one.slot_bytes)
        except FileNotFoundError as error:
            raise Lost(f"the offloaded device memory of process {process.pid} is gone: {error}") from error
        log.info("process %d: %d bytes of device memory are back", process.pid, memory.fill(limit_s))

    if any(await all_at_once(replaces, known.striped_processes)):
        await in_thread(sharing.close_again, known.cuda)
    try:
        await all_at_once(back, known.striped_processes)
    except Timeout:
        # A parked thread may hold what a call waits for. The threads may run if nothing is closed (`memory.bring_back`).
        with contextlib.suppress(SnapshotError):
            await in_thread(sharing.reopen, known.cuda)
        raise
    await in_thread(sharing.reopen, known.cuda)


def _drop(memory: DeviceMemory) -> None:
    try:
        memory.drop()
    except RankGone:
        raise
    except SnapshotError as error:
        pid = memory.process.pid
        log.warning("process %d keeps what was prepared to offload its device memory: %s", pid, error.message)


async def on_target(
    processes: Mapping[int, Process],
    device: Sequence[OffloadedMemory],
    folder: Path,
    incoming: Incoming | None,
    parts: Parts,
    fills: Fills | TakeOver | None = None,
) -> None:
    """Refills the restored processes, by their inner pid, from the stripes in `folder`; `incoming` receives these, unless
    they came with the image. `device`: as the source described it. `fills`: they go to memory on the GPU as they arrive, or
    that memory is taken over, and the processes get it."""
    if device:
        began = host.boottime_s()
        wanted_bytes = sum(one.total_bytes for one in device)
        limit_s = ARRIVE_S + ARRIVE_GIB_S * wanted_bytes / 2**30
        memories = await in_thread(_memories, processes, device)
        if incoming is not None and incoming.failed is not None:
            raise incoming.failed
        if fills is not None:
            given_bytes = await fills.give(processes, device, limit_s)
            stripe_files.must_match(device, stripe_files.sizes_of(device), given_bytes)
            parts.add(fills.part, host.boottime_s() - began, wanted_bytes)
            await reach(Point.REFILLED)
        else:
            await _from_files(memories, device, folder, incoming, limit_s, parts)
    try:
        await in_thread(sharing.reopen, list(processes.values()))
    except Lost as lost:
        raise GpuFailed(str(lost), remedy="the job continues on its source", where=Where.SOURCE_FROZEN) from lost
    for process in processes.values():
        if await in_thread(devmem.is_out, process):
            raise GpuFailed(
                f"the device memory of the restored process {process.pid} did not come with it",
                remedy="the job continues on its source",
                where=Where.SOURCE_FROZEN,
            )


async def _from_files(
    memories: Sequence[DeviceMemory],
    device: Sequence[OffloadedMemory],
    folder: Path,
    incoming: Incoming | None,
    limit_s: float,
    parts: Parts,
) -> None:
    began = host.boottime_s()
    given_up = threading.Event()
    filling = asyncio.ensure_future(_fill_all(memories, device, folder, limit_s, given_up))
    try:
        sizes = await _arrived(incoming, filling, limit_s) if incoming is not None else _sizes(folder, device)
        filled_bytes = await filling
    except BaseException:
        given_up.set()
        await _cancel(filling, memories)
        raise
    stripe_files.must_match(device, sizes, filled_bytes)
    parts.add("refill", host.boottime_s() - began, filled_bytes)
    await reach(Point.REFILLED)


def must_be_here(folder: Path, device: Sequence[OffloadedMemory]) -> None:
    """Raises Unreachable unless all stripes arrived before a restart of this daemon closed their channel. Blocking."""
    missing = [name for name, size in stripe_files.sizes_of(device).items() if _arrived_bytes(folder / name) != size]
    if missing:
        raise Unreachable(
            f"this daemon was restarted while device memory was on its way: {', '.join(missing)} did not arrive whole",
            remedy="the job continues on its source; a plain retry is safe",
            where=Where.SOURCE_FROZEN,
        )


def _arrived_bytes(stripe: Path) -> int | None:
    """The size of a stripe, which its receiver recorded when all of it was verified and stored."""
    try:
        size = json.loads(stripe.with_name(f"{stripe.name}.done").read_text())["size"]
        return int(size) if stripe.stat().st_size == size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _memories(processes: Mapping[int, Process], device: Sequence[OffloadedMemory]) -> list[DeviceMemory]:
    found = []
    for one in device:
        process = processes.get(one.pid)
        memory = devmem.find(process) if process is not None else None
        if memory is None or not memory.offloaded():
            raise Damaged(f"process {one.pid} was not restored as it was dumped", where=Where.SOURCE_FROZEN)
        found.append(memory)
    return found


async def _fill_all(
    memories: Sequence[DeviceMemory],
    device: Sequence[OffloadedMemory],
    folder: Path,
    limit_s: float,
    given_up: threading.Event,
) -> int:
    def fill(one: tuple[DeviceMemory, OffloadedMemory]) -> int:
        memory, offloaded = one
        with stripe_files.opened(folder, offloaded.stripes, os.O_RDONLY) as fds:
            memory.ready(fds, offloaded.slot_bytes)
        if given_up.is_set():  # set while there was nothing to cancel yet
            raise GpuFailed("device memory is not filled: the move was given up", where=Where.SOURCE_FROZEN)
        return memory.fill(limit_s)

    return sum(await all_at_once(fill, list(zip(memories, device, strict=True))))


async def _arrived(incoming: Incoming, filling: asyncio.Future[int], limit_s: float) -> Mapping[str, int]:
    """The stripes' sizes once all have arrived. Fails with either side; a network failure is reported first."""
    arriving = asyncio.ensure_future(incoming.wait(limit_s))
    try:
        both: list[asyncio.Future[Any]] = [arriving, filling]
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not arriving.done():
            filling.result()
        return await arriving
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)


async def _cancel(filling: asyncio.Future[int], memories: Sequence[DeviceMemory]) -> None:
    """Cancels repeatedly: a fill that begins just after one cancellation does not notice it."""
    while not filling.done():
        with contextlib.suppress(SnapshotError):
            await all_at_once(lambda memory: memory.cancel(), memories)
        await asyncio.wait([filling], timeout=CANCEL_AGAIN_S)
    await asyncio.gather(filling, return_exceptions=True)


def _sizes(folder: Path, device: Sequence[OffloadedMemory]) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for one in device for name in one.stripes}
