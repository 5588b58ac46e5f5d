"""Carries out preflight on the source: collects facts about a rank, and checks whether it can move. Changes nothing."""

from __future__ import annotations

import asyncio

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.device import cuda_processes
from snapshotd.moves.node import Node
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread

KEEPER_BACK_S = 5.0


async def facts(node: Node, entry: RankEntry) -> tuple[pb.RankFacts, list[pb.Check]]:
    """The facts about a rank, and the checks of preflight on its source."""
    config, pids = node.config, entry.group.pids()
    look, more = await cuda_processes.find(node.gpus, pids)
    nccl = await in_thread(preflight.read_nccl_reports, pids)
    facts, checks = await in_thread(
        preflight.inspect_rank,
        pids,
        entry.pid,
        rank=entry.to_proto(config.node),
        node=config.node,
        daemon_version=host.DAEMON_VERSION,
        criu_version=config.criu_version,
        carry_paths=config.carry_paths,
        keeper_pid=entry.keeper_pid if entry.link is not None else 0,
        keeper_is_guest=entry.role == "guest",
        gpu=look,
        nccl=nccl,
    )
    if offloaded_bytes := facts.gpu.offloaded_bytes:
        more.append(preflight.offload_room(offloaded_bytes, await in_thread(node.store.room_bytes)))
    return facts, [*checks, *more]


async def keeper_back(entry: RankEntry) -> None:
    """Waits for the rank's keeper to reconnect, which takes a moment after a restart of this daemon."""
    deadline_s = host.boottime_s() + KEEPER_BACK_S
    while entry.link is None and entry.keeper_alive() and host.boottime_s() < deadline_s:  # noqa: ASYNC110 - bounded, rare
        await asyncio.sleep(0.05)
