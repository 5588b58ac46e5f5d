"""Freezes a rank: stops it, freezes its cgroup, filters its connections, and moves its device memory to host memory.

Invariant: FREEZING is journalled before anything is stopped, with all that an undo needs; FROZEN once everything has stopped.
If a part in between fails, `Departure.thaw` brings the rank back from any state in between.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable

from snapshotd import preflight
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, GpuFailed, RankGone, Refused, Undone, Where, WrongState
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.device import checkpoint_room, cuda_processes, hold, memory, offload, sharing, standstill
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import gate_processes, held_copy, leftovers
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections, new_connections, socket_options
from snapshotd.moves.record_parts import ClusterNode, JournalledProcess, NcclProcess
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import twins
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.net.places import Places
from snapshotd.net.sockets import tree_flows
from snapshotd.proc import host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

FREEZE_S = 20.0
#: How long workers of torch.compile may take to end, in all and one after the other. The job runs meanwhile.
COMPILERS_S, COMPILERS_QUIET_S = 1.0, 0.15


async def make_ready(node: Node, moving: Moving, entry: RankEntry, parts: Parts) -> None:
    """Does the work for which the job need not wait: returns free blocks to the driver, has torch.compile end its idle
    workers, which otherwise move with the rank, and prepares stripes for the rest.

    Done before the gates close: behind a gate the interpreter reaches no safe point, and all ranks of the job wait."""
    processes = await cuda_processes.must_find(node.gpus, entry.group.pids())
    await sharing.attempt(processes, known=_shares(moving))
    emptied = await memory.empty_caches(processes, parts)
    left_bytes = emptied.released_bytes
    node.caches_left[moving.log.move] = left_bytes or 0
    if emptied.pools_told:
        with span("end compilers"):
            await _compilers_ended(entry.group)
        processes = await cuda_processes.must_find(node.gpus, entry.group.pids())
    await _prepare(node, moving, processes, parts)
    if moving.offload is not None and left_bytes is not None:
        # That took a while, and the job may have filled the caches again. One that did not answer in time is not asked again.
        again = await memory.empty_caches(processes, parts)
        left_bytes = max(left_bytes, again.released_bytes or 0)
        if again.pools_told:
            await _compilers_ended(entry.group)
    node.caches_left[moving.log.move] = left_bytes or 0


async def _compilers_ended(group: Cgroup) -> None:
    """Waits until no more processes end. Workers need some milliseconds for that; those that compile stay."""
    began_s = last_s = host.boottime_s()
    known = set(group.pids())
    while host.boottime_s() < min(began_s + COMPILERS_S, last_s + COMPILERS_QUIET_S):
        await asyncio.sleep(0.01)
        if known - (known := set(group.pids())):
            last_s = host.boottime_s()


async def freeze(
    node: Node, moving: Moving, entry: RankEntry, places: Places, pending: Callable[[Iterable[int]], str]
) -> pb.FreezeReply:
    """Stops the tree and freezes its cgroup. The caller holds the move's lock."""
    began, move, group = host.boottime_s(), moving.log.move, entry.group
    await reach(Point.BEFORE_FREEZE)
    before = moving.log.record.stopped_before  # a repeated freeze would find processes that it has stopped itself
    if before is None:
        before = [tree.inner_pid(pid) for pid in group.pids() if tree.state(pid) == "T"]
    if (link := entry.link) is None:
        raise WrongState("the rank's keeper is not connected", where=Where.SOURCE_RUNNING)
    if not moving.facts.rank.process.pid:  # they are not journaled
        raise Undone(
            "the source's daemon was restarted after it had checked the rank",
            remedy="retry the move; the rank runs on",
            where=Where.SOURCE_RUNNING,
        )

    parts = Parts()
    with span("find processes"):
        processes = await cuda_processes.must_find(node.gpus, group.pids())
        nccl = await _in_communicators(moving, entry)
    left_bytes = node.caches_left.pop(move, 0)
    uses = _expected(moving, left_bytes) if processes else {}
    await _prepare(node, moving, processes, parts)
    await in_thread(
        moving.log.mark,
        Mark.FREEZING,
        stopped_before=before,
        filtered=True,
        new_connections_held=True,
        cuda_processes=[JournalledProcess.of(process) for process in processes],
        nccl_processes=nccl,
        gpu_uses=uses,
        device_bytes=memory.total(uses) if processes else 0,
    )
    with span("hold new connections"):
        held = await in_thread(new_connections.hold, move, await in_thread(tree_flows, group.pids()))
        if held:
            await in_thread(new_connections.drain, group.pids())
    with span("hold keeper"):
        await link.hold(move)
    with span("stand still"):
        await standstill.hold(node.gpus, processes, group, parts, held_copy.processes(nccl))

    async def journal(uses: dict[str, int]) -> None:
        await in_thread(moving.log.mark, Mark.FREEZING, gpu_uses=uses, device_bytes=memory.total(uses))

    async def offload_all() -> int:
        size = 0
        parked = standstill.parked_ones(processes, held_copy.processes(nccl))
        stop_others = functools.partial(standstill.stop_others, group, parked)
        others = [other for other in node.ranks.all() if other.uid != entry.uid]
        await sharing.close(node.gpus, processes, others, parts, stop_others, known=_shares(moving))
        if moving.offload is not None:
            size = await moving.offload.out(node.gpus, processes, parts, stop_others)
        await sharing.must_be_out(processes)
        await hold.own_rest(node.gpus, processes, memory.copy_s(memory.total(uses)))
        await in_thread(checkpoint_room.begins, node, move, processes)
        return size

    try:
        with span("device memory"):
            device_bytes = await memory.take_off(node.gpus, processes, uses, parts, journal, offload_all)
    except GpuFailed as error:
        raise await in_thread(leftovers.explained, error, held_copy.processes(nccl)) from error
    await in_thread(checkpoint_room.give_up, node, move)  # it is the job's own memory now
    if moving.log.begin.kind == "snapshot":
        await _twin(node, moving, group, parts)
    with span("stop"):
        await in_thread(tree.stop_all, group, FREEZE_S)
    await reach(Point.STOPPED)
    with span("freeze"):
        await in_thread(group.freeze, FREEZE_S)
    if not entry.process.alive():
        raise RankGone(f"rank {entry.rank} ended during the freeze", where=Where.UNKNOWN)
    if moving.precopy is not None and moving.precopied is None:
        with span("written memory"):
            moving.precopied = await in_thread(moving.precopy.finish)
    if other := pending(group.pids()):
        raise Busy(f"move {other} of a rank it talks to is not finished", where=Where.SOURCE_FROZEN)
    rewires = await _silence(moving, entry, link, places, held=held)
    await reach(Point.FREEZE)
    count = len(group.pids())
    log.info("froze rank %s: %d processes, %d MiB of device memory", entry.rank, count, device_bytes >> 20)
    moving.renew()
    seconds = host.boottime_s() - began
    metrics.phase("freeze", seconds)
    return pb.FreezeReply(
        seconds=seconds,
        processes=count,
        rewires=rewires,
        parts=parts.all,
        device_bytes=device_bytes,
        device_bytes_left=left_bytes,
        warnings=moving.offload.warnings if moving.offload is not None else (),
    )


async def _twin(node: Node, moving: Moving, group: Cgroup, parts: Parts) -> None:
    """As late as possible: what the rank writes from now on is dumped by criu."""
    began = host.boottime_s()
    made = await in_thread(twins.make, node, moving.log, group)
    moving.twins = TwinMemory(node, moving.log, made)
    if made:
        parts.add("twin", host.boottime_s() - began)
    await reach(Point.TWINNED)


async def _prepare(node: Node, moving: Moving, processes: list[tree.Process], parts: Parts) -> None:
    """Prepares the stripes, once, unless this daemon was restarted since."""
    if not moving.prepared:
        began = host.boottime_s()
        preflight_bytes = int(moving.facts.gpu.offloaded_bytes)
        gpus = [use.uuid for use in moving.facts.gpu.uses]
        moving.offload = await offload.prepare(node, moving.log, processes, preflight_bytes, gpus)
        moving.prepared = True
        if moving.offload is not None:
            parts.add("prepare", host.boottime_s() - began)
    elif moving.offload is not None:
        await moving.offload.reopen_channel()
    if _shares(moving):
        offloaded = moving.offload
        striped = [one.process for one in offloaded.striped] if offloaded is not None else []
        await sharing.must_leave_in_stripes(
            processes, striped, "; ".join(offloaded.warnings) if offloaded is not None else ""
        )
    if moving.offload is not None and processes:
        await in_thread(moving.offload.must_fit, processes[0].pid, Where.SOURCE_RUNNING)
    elif processes:
        size, why = int(moving.facts.gpu.device_bytes), "no device memory can be offloaded, and"
        move, pid = moving.log.move, processes[0].pid
        await in_thread(checkpoint_room.reserve, node, move, pid, size, why, Where.SOURCE_RUNNING)


def _shares(moving: Moving) -> bool:
    """Whether preflight has found memory that the rank's processes share, and that this node and the target can move it."""
    return protocol.carries_shared_memory(moving.facts.protocol)


def _expected(moving: Moving, left_bytes: int) -> dict[str, int]:
    """Bytes on each GPU, by UUID, as preflight or an earlier attempt of this freeze saw them."""
    if known := moving.log.record.gpu_uses:
        return dict(known)
    uses = {use.uuid: use.memory_bytes for use in moving.facts.gpu.uses}
    if len(uses) == 1:
        uses = {uuid: max(min(size, memory.CONTEXT_BYTES), size - left_bytes) for uuid, size in uses.items()}
    return uses


async def _in_communicators(moving: Moving, entry: RankEntry) -> list[NcclProcess]:
    """The processes whose communicators were taken down for this move. Raises if one is still up: no socket or thread of
    NCCL survives a move, and the job would fail without a known cause."""
    instances = dict(moving.log.record.nccl_instances)
    found = []
    for gated, report in await gate_processes.find([entry]):
        up = [comm.id for comm in report.comms if comm.real]
        if up:
            raise Refused(
                f"nccl-communicators: process {gated.pid} has some that were not taken down: {', '.join(up[:5])}",
                remedy="the job was creating them; a plain retry is safe",
                where=Where.SOURCE_RUNNING,
            )
        instance = instances.get(gated.inner_pid, report.instance)
        found.append(NcclProcess(gated.pid, gated.start_ticks, instance))
    return found


async def _silence(
    moving: Moving, entry: RankEntry, link: KeeperLink, places: Places, *, held: bool
) -> list[pb.Rewire]:
    """Journals and filters the frozen rank's connections, takes over its unread input and output, and marks it FROZEN.
    `held`: new connections are held already, maybe at a listener that the rank has closed before it was stopped."""
    move, group = moving.log.move, entry.group
    with span("find connections"):
        rewires, flows = await in_thread(connections.frozen, group.pids(), places)
    with span("filter"):
        await in_thread(connections.hold, move, rewires, on_target=False)
        held = await in_thread(new_connections.hold, move, flows) or held  # also at new listeners
    with span("socket options"):
        sockets = await in_thread(socket_options.of, flows)
    with span("drain stdio"):
        stdio = await link.drain(move)
    with span("sync files"):
        problems = await in_thread(preflight.sync_files, group.pids())
    for problem in problems:
        log.warning("not synced: %s", problem)
    await in_thread(
        moving.log.mark,
        Mark.FROZEN,
        stdio=await in_thread(stdio.to_json),
        rewires=rewires,
        nodes=[ClusterNode.of(node) for node in moving.nodes],
        socket_options=sockets,
        filtered=bool(rewires),
        new_connections_held=held,
    )
    await in_thread(socket_options.suspend, sockets.timers)
    return rewires
