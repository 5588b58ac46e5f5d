"""The part of a source in suspending a whole job: its move has a coordinator, whose record decides, instead of a target.

Invariant: see snapshotd/moves/job_rules.py. Once a whole image is stored here, nothing but the coordinator's outcome ends
the move.
"""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Where, WrongState
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import kept_files
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files, freeze
from snapshotd.moves.where import where_of
from snapshotd.runtime.blocking import in_thread, waiting_for_disk
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span


def coordinator_checks(entry: RankEntry, node: str) -> list[pb.Check]:
    """A warning if the job cannot do without this node after the rank has left it."""
    if not entry.tethered or entry.coordinator_node != node:
        return []
    return [
        pb.Check(
            name="job-coordinator",
            verdict=pb.Check.WARN,
            reason=f"{node} coordinates the snapshots of job {entry.job}: if it is switched off after the move, all ranks of"
            f" the job end. Make another node the coordinator before that: `migrator job snapshot {entry.job}`",
        )
    ]


def must_be_bound_to(entry: RankEntry, coordinator: str) -> None:
    """Raises WrongState if the rank's job has a snapshot that another node coordinates: that one could roll the job back
    while this coordinator suspends it, or takes another snapshot."""
    if entry.tethered and entry.coordinator_node != coordinator:
        raise WrongState(
            f"snapshots of rank {entry.rank} are coordinated by {entry.coordinator_node}, not by {coordinator}",
            remedy=f"start snapshotd on {entry.coordinator_node}, then retry",
            where=Where.SOURCE_RUNNING,
        )


def must_not_be(move_log: MoveLog, why: str) -> None:
    """Raises WrongState for the move of a rank that is suspended."""
    if move_log.begin.coordinator:
        raise WrongState(
            f"{move_log.move} suspends rank {move_log.begin.rank} with its job: {why}",
            remedy="`migrator job list` shows the suspension",
            where=where_of(move_log),
        )


def decides_alone(move_log: MoveLog) -> bool:
    """Whether this daemon may record ABORT without asking. With a whole image here, the coordinator may have committed."""
    return not move_log.begin.coordinator or move_log.last_mark is not Mark.STREAMED


def copy_exists(move_log: MoveLog, entry: RankEntry | None) -> bool:
    """Whether the rank's process is here, and the keeper without which it must not run."""
    return move_log.copy_exists() and entry is not None and entry.keeper_alive()


async def make_room(node: Node, moving: Moving, entry: RankEntry) -> None:
    """Reserves room for the image while the rank runs, and for its device memory on its way there: in stripe files, or in the
    rank's own memory, into which the driver's checkpoint copies it. Stores files that the rank has closed. Raises Full."""
    move_log, facts = moving.log, moving.facts
    is_snapshot = move_log.begin.kind == "snapshot"
    if is_snapshot:  # before the stripe files are made: they are in the same place, if that is possible
        whole_bytes = facts.memory_bytes + facts.carried_bytes + kept_files.ROOM_BYTES
        with waiting_for_disk():
            await in_thread(node.store.spill, move_log.move, whole_bytes)
    if facts.HasField("gpu"):
        with node.store_of(move_log.begin).threads(move_log.move):
            await freeze.make_ready(node, moving, entry, Parts())
        facts.gpu.offloaded_bytes = moving.offload.expected_bytes if moving.offload is not None else 0
    needed_bytes = facts.memory_bytes + facts.carried_bytes
    if is_snapshot:
        # The stripe files themselves become part of the image.
        needed_bytes = max(0, needed_bytes - facts.gpu.offloaded_bytes) + kept_files.ROOM_BYTES
        await in_thread(node.kept_files.ready, move_log.move, facts)
        with waiting_for_disk():
            await in_thread(node.store.create_kept, move_log.move, needed_bytes)
    else:
        await in_thread(node.store_of(move_log.begin).create, move_log.move, needed_bytes)
    with span("store closed files"), node.store_of(move_log.begin).threads(move_log.move):
        moving.ahead = await closed_files.send_ahead(node, moving, entry)
    await reach(Point.SENT_AHEAD)


def must_fit(entry: RankEntry, request: pb.BeginRequest) -> None:
    """Raises Usage for a coordinator's record without a valid name. Raises WrongState if another node coordinates the rank's
    job, or if the job was rolled back since the snapshot was asked for."""
    check_move_id(request.coordinator.record)
    must_be_bound_to(entry, request.coordinator.node)
    if request.snapshot and entry.incarnation != request.incarnation:
        raise WrongState(f"rank {entry.rank} is of another incarnation of its job now", where=Where.SOURCE_RUNNING)
