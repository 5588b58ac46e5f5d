"""Describes a frozen rank for its target: what criu's images do not have, and what the target compares the copy with."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, Damaged, Where
from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.moves import affinity, tree_facts
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.proc import cgroup, cgroup_limits, gpu_cpus, tree
from snapshotd.proc.credentials import Identity


def describe(
    known: MoveRecord,
    entry: RankEntry,
    facts: pb.RankFacts,
    pids: list[int],
    carried: preflight.Carried,
    new_files: list[pb.FileFact],
    device: list[OffloadedMemory],
    *,
    by_device_channel: bool,
) -> ImageDescription:
    """Blocking. Raises Changed if the rank has other credentials than when it was checked."""
    identity = Identity.of(entry.pid)  # `recheck` has refused programs that have none
    if identity.to_proto() != facts.identity:
        raise Changed(
            f"credentials: the rank ran as {Identity.of_proto(facts.identity)} when it was checked,"
            f" and now as {identity}",
            remedy="retry: preflight will then see the present user and groups",
            where=Where.SOURCE_FROZEN,
        )
    return ImageDescription(
        root=tree.inner_pid(entry.pid),
        command=entry.command,
        started_unix_s=entry.started_unix_s,
        moves=entry.moves,
        user_id=entry.user_id,
        identity=identity,
        limits=cgroup_limits.read(entry.group.path, cgroup.mount_point()),
        stopped_before=known.stopped_before or [],
        affinity=affinity.read(pids),
        cpus=sorted(os.sched_getaffinity(0)),
        gpus=(gpus := [use.uuid for use in facts.gpu.uses]),
        gpu_cpus=sorted(gpu_cpus.near(gpus)),
        carried=carried.facts,
        other_names=carried.other_names,
        stdio=_stdio_of(known.stdio),
        relay_key=entry.relay_key,
        relay_keys=relay_keys.to_hand_over(entry),
        home_node=entry.home_node,
        home_endpoint=entry.home_endpoint,
        home_boot_id=entry.boot_id if entry.role == "home" else entry.home_boot_id,
        incarnation=entry.incarnation,
        coordinator_node=entry.coordinator_node,
        coordinator_endpoint=entry.coordinator_endpoint,
        tethered=entry.tethered,
        rewires=known.rewires,
        nodes=known.nodes,
        former=[(old, new) for old, new in entry.former],
        socket_options=known.socket_options,
        new_files=new_files,
        tree=tree_facts.gather(pids, [*facts.files, *new_files]),
        cuda_pids=[tree.inner_pid(process.pid) for process in known.cuda],
        checkpoint_bytes=max(0, known.device_bytes - known.offloaded_bytes),
        nccl_instances=[(tree.inner_pid(one.pid), one.instance) for one in known.nccl_processes],
        offloaded=device,
        by_device_channel=by_device_channel,
    )


def _stdio_of(journalled: dict[str, Any] | None) -> StdioState:
    try:
        return msgspec.convert(journalled, StdioState)
    except msgspec.ValidationError as error:
        raise Damaged(f"the journalled stdio state is invalid: {error}", where=Where.SOURCE_FROZEN) from error
