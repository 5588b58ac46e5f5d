"""What the daemon registers of a copy before it exists: everything but its processes."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.peers.forwarding import moved_listeners
from snapshotd.moves.record_parts import ClusterNode
from snapshotd.net.places import Places
from snapshotd.proc import host
from snapshotd.proc.cgroup import Cgroup


def of(
    move_log: MoveLog,
    image: ImageDescription,
    group: Cgroup,
    rewires: Sequence[pb.Rewire],
    nodes: Sequence[ClusterNode],
) -> RankEntry:
    begin, record = move_log.begin, move_log.record
    entry = RankEntry(
        uid=begin.rank_uid,
        job=begin.job,
        rank=begin.rank,
        role="guest",
        keeper_pid=0,
        keeper_start_ticks=0,
        cgroup=str(group.path),
        home_node=image.home_node,
        home_endpoint=image.home_endpoint,
        home_boot_id=image.home_boot_id,
        relay_key=image.relay_key,
        boot_id=host.boot_id(),
        user_id=image.user_id,
        process_user_id=image.identity.user_id,
        command=image.command,
        started_unix_s=image.started_unix_s,
        moves=image.moves + 1,
        restored_by=begin.move,
        incarnation=begin.coordinator or image.incarnation,
        coordinator_node=begin.coordinator_node or image.coordinator_node,
        coordinator_endpoint=begin.coordinator_endpoint or image.coordinator_endpoint,
        tethered=record.tethered if begin.coordinator else image.tethered,
    )
    keys = image.relay_keys or [image.relay_key]
    if ended := record.ended_before:  # the home node may have seen newer keys than the image has
        keys = relay_keys.come_back(image.relay_key, image.relay_keys, ended)
    relay_keys.take_over(entry, keys)
    came_from = record.from_node or begin.source_node  # another node may have sent its image
    entry.nodes = [node.to_list() for node in nodes]
    entry.former = moved_listeners(
        image.former,
        rewires,
        Places.of([node.to_proto() for node in nodes], came_from, begin.target_node),
        leaves_home=came_from == entry.home_node,
        comes_home=begin.target_node == entry.home_node,
    )
    entry.moving = begin.move
    return entry
