"""Ends a move on its source: thaws the rank, or drops its frozen copy because the rank runs elsewhere.

Invariant: nothing here decides. The outcome is in the journal before any of this is called, and every operation can be
repeated, in the next round of settling or after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from snapshotd.api.errors import SnapshotError
from snapshotd.files.as_user import User
from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.device import checkpoint_room, hold, memory, refill, stripe_files
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import held_copy
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections, new_connections, socket_options
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files, twins
from snapshotd.moves.source.dump import Dump
from snapshotd.proc import host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

KILL_S = 20.0
#: How long new connections are held after a move if no node reports that they are forwarded.
FORWARD_S = 30.0


class Departure:
    """The operations that end a move on its source. One instance per daemon."""

    def __init__(self, node: Node, communicators: Communicators) -> None:
        self.node, self.communicators = node, communicators
        self._later: set[asyncio.Task[None]] = set()
        self._forwarded: set[str] = set()  # ranks that left, and whose new connections are forwarded here

    def begins(self, rank_uid: str) -> None:
        """The rank is about to move again: a forwarding from its last move does not count any more."""
        self._forwarded.discard(rank_uid)

    def own_entry(self, move_log: MoveLog) -> RankEntry | None:
        """The entry of the copy that this move is about; not that of a copy that has come back since."""
        entry = self.node.ranks.get(move_log.begin.rank_uid, move_log.record.keeper_role or "home")
        return entry if entry is not None and entry.cgroup == move_log.record.cgroup else None

    async def thaw(self, moving: Moving) -> None:
        """ABORT stands: lets the copy here continue if its keeper is alive. Otherwise ends it."""
        move_log = moving.log
        await in_thread(
            checkpoint_room.give_up, self.node, move_log.move
        )  # an undo may have to wait for room on the GPU
        if moving.precopy is not None:
            await in_thread(moving.precopy.close)
        if moving.offload is not None:
            await moving.offload.close()
        if moving.twins is not None:
            await moving.twins.close()
        elif move_log.begin.kind == "snapshot":
            await in_thread(twins.end, self.node, move_log)
        if move_log.begin.coordinator:
            await in_thread(self.node.kept_files.drop, move_log.move)
            await in_thread(self.node.store_of(move_log.begin).drop, move_log.move)
        if move_log.known.continued:
            await self._close(moving)
            return
        await self._let_run(moving)
        await self._close(moving)
        await self.communicators.open_all(moving)

    async def go_on(self, moving: Moving) -> None:
        """The image of a snapshot is complete: lets the rank go on. Whether the image counts is decided later. Until then the
        rank does not move: a copy on another node would not be bound to the coordinator."""
        await reach(Point.BEFORE_CONTINUE)
        await self._let_run(moving)
        await in_thread(moving.log.mark, Mark.STREAMED, continued=True)
        if moving.offload is not None and moving.offload.into_image is not None:
            moving.offload.into_image.save_soon()
        if moving.twins is not None:
            moving.twins.save_soon()
        await reach(Point.CONTINUE)

    async def keep(self, moving: Moving) -> None:
        """The snapshot is complete: its coordinator may end this incarnation of the rank, and roll it back, from now on."""
        begin, entry = moving.log.begin, self.own_entry(moving.log)
        if entry is not None:
            entry.coordinator_node, entry.coordinator_endpoint = begin.coordinator_node, begin.coordinator_endpoint
            entry.tethered = True
            if entry.link is not None:
                with contextlib.suppress(SnapshotError):  # it is told again when it reconnects
                    await entry.link.protect()
            await in_thread(self.node.ranks.update, entry)
            if entry.link is not None:
                entry.link.key_changed.set()  # a guest's relay tells the home node who may end the rank
        await in_thread(moving.log.mark, Mark.SETTLED, pause_s=moving.pause_s)
        self._free(moving)
        moving.wake()

    async def _let_run(self, moving: Moving) -> None:
        """Brings the frozen copy back to life, from any state in between."""
        move_log = moving.log
        await Dump.sweep(self.node, move_log)
        entry = self.own_entry(move_log)
        group = Cgroup(Path(move_log.record.cgroup))
        here = move_log.begin.boot_id == host.boot_id() and group.exists()
        if entry is None or not entry.keeper_alive():
            await in_thread(connections.let_go, move_log)  # its connections end with it
            await in_thread(new_connections.admit, move_log)
            await in_thread(group.kill, KILL_S)
            if entry is not None:
                await self.node.lost(entry)
        elif move_log.last_mark is not Mark.BEGUN:
            if entry.link is not None:
                with contextlib.suppress(SnapshotError):  # a keeper that is not connected learns it when it reconnects
                    await entry.link.resume(move_log.move)
            if here:
                await in_thread(connections.wake, group.pids(), move_log.record.socket_options)
            await in_thread(connections.let_go, move_log)
            await in_thread(new_connections.admit, move_log)
            if here:
                before = move_log.record.stopped_before or []
                await in_thread(tree.continue_all, group, before)
                await in_thread(group.thaw, KILL_S)
                await self._bring_back(moving, group)
                await in_thread(socket_options.resume, move_log.record.socket_options.timers)
        elif here:
            await self._refill(moving)  # nothing is offloaded: gives up what was prepared
        if here and entry is not None and entry.keeper_alive():
            await self.communicators.put_back(moving)
            if move_log.last_mark is not Mark.BEGUN and move_log.begin.kind != "snapshot":
                await self._replace_relay_key(entry)
        else:
            await self.communicators.give_up_building(moving, "the rank that was to move has ended")

    async def _replace_relay_key(self, entry: RankEntry) -> None:
        """The target may have the key of the relay, and has no part in the rank any more."""
        relay_keys.replace(entry)
        await in_thread(self.node.ranks.update, entry)
        if entry.link is not None:
            entry.link.key_changed.set()

    async def _bring_back(self, moving: Moving, group: Cgroup) -> None:
        """Brings back a GPU rank's device memory, then releases its threads. Ends a rank whose device memory the driver lost,
        so that its launcher notices now, not after a time-out of hours."""
        known = moving.log.record
        needs = dict(known.gpu_uses)
        if len(needs) == 1:  # what is held is on the GPU already
            held_bytes = await in_thread(hold.held_bytes, self.node.holder, moving.log.move)
            needs = {uuid: max(0, size - held_bytes) for uuid, size in needs.items()}
        try:
            await memory.bring_back(
                self.node.gpus,
                known.cuda,
                needs,
                known.device_bytes,
                held_copy.processes(known.nccl_processes),
                lambda: self._refill(moving),
            )
        except memory.Lost as lost:
            moving.failure = f"the rank was ended: {lost}"
            log.error("rank %s: %s", moving.log.begin.rank, moving.failure)
            await in_thread(group.kill, KILL_S)

    async def _refill(self, moving: Moving) -> None:
        if moving.offload is not None and moving.offload.into_image is not None and not moving.log.aborted:
            await moving.offload.into_image.give_back()
        await refill.on_source(self.node.config.image_dir, moving.log, self.node.holder)

    async def release(self, moving: Moving) -> None:
        """COMMIT stands and the target runs the rank: drops the copy here."""
        move_log = moving.log
        await reach(Point.BEFORE_RELEASE)
        role = move_log.record.keeper_role or "home"
        entry = self.own_entry(move_log)
        await in_thread(connections.part, move_log, Cgroup(Path(move_log.record.cgroup)).pids())
        if entry is not None:
            if role == "home":
                if entry.link is None and entry.keeper_alive():
                    moving.waiting_for = "the keeper here has not reconnected yet"
                    return
                if entry.link is not None:
                    await entry.link.away(move_log.move, move_log.begin.target_node)
                entry.away_node = move_log.begin.target_node
                entry.nodes = [
                    node.to_list() for node in move_log.record.nodes
                ]  # where its listeners are forwarded until it ends
                await in_thread(self.node.ranks.put, entry)
            else:
                await in_thread(connections.silence, Cgroup(Path(move_log.record.cgroup)).pids())
                entry.keeper.signal(9)  # PID 1 of the rank's pid namespace: the kernel kills everything in it
        group = Cgroup(Path(move_log.record.cgroup))
        await in_thread(connections.silence, group.pids())
        await in_thread(group.kill, KILL_S)
        await in_thread(connections.let_go, move_log)
        if entry is not None and role == "guest":
            self.node.ranks.remove(entry)
        if move_log.record.rank_user is not None:  # None: an older version dumped the rank
            await in_thread(self.node.carry.remember, move_log.record.carried, User(*move_log.record.rank_user))
        await in_thread(closed_files.leave, self.node, move_log)
        await Dump.sweep(self.node, move_log)
        if move_log.begin.coordinator and role == "home" and entry is not None and not entry.keeper_alive():
            await in_thread(self.node.ranks.bury, entry)  # it was killed after the coordinator had asked for it
        await self._close(moving, await self._sent_bytes(moving))
        await self._admit_new_connections(move_log)
        await reach(Point.RELEASE)

    async def _admit_new_connections(self, move_log: MoveLog) -> None:
        """Admits new connections to the rank's former address once they are forwarded, at the latest after FORWARD_S."""
        if move_log.record.new_connections_held:
            if move_log.begin.rank_uid in self._forwarded or move_log.begin.coordinator:
                await in_thread(new_connections.admit, move_log)
            else:
                task = asyncio.create_task(self._admit_later(move_log), name=f"new connections of {move_log.move}")
                self._later.add(task)
                task.add_done_callback(self._later.discard)

    async def _admit_later(self, move_log: MoveLog) -> None:
        await asyncio.sleep(FORWARD_S)
        await in_thread(new_connections.admit, move_log)

    async def forwarded(self, rank_uid: str) -> None:
        """New connections to a rank are forwarded from here now: the moves by which it left need not hold them any more."""
        self._forwarded.add(rank_uid)
        for move_log in self.node.journal.all():
            begin = move_log.begin
            if (begin.role, begin.rank_uid) == ("source", rank_uid) and move_log.last_mark is Mark.SETTLED:
                await in_thread(new_connections.admit, move_log)

    async def _sent_bytes(self, moving: Moving) -> int:
        """Bytes of the image and of the device-memory channel."""
        beside = await moving.offload.finish() if moving.offload is not None else 0
        return moving.log.record.sent_bytes + beside

    async def _close(self, moving: Moving, sent_bytes: int | None = None) -> None:
        await in_thread(stripe_files.sweep, self.node.config.image_dir, moving.log.move)
        await in_thread(checkpoint_room.give_up, self.node, moving.log.move)
        await in_thread(hold.let_go, self.node.holder, moving.log.move)
        sent_bytes = moving.log.record.sent_bytes if sent_bytes is None else sent_bytes
        await in_thread(
            moving.log.mark,
            Mark.SETTLED,
            pause_s=moving.pause_s,
            predicted_s=moving.timing.predicted_s,
            timing=moving.timing,
            sent_bytes=sent_bytes,
            failure=moving.failure,
        )
        outcome = moving.log.outcome
        self.node.caches_left.pop(moving.log.move, None)
        metrics.move_ended(outcome.outcome if outcome else "ABORT")
        self._free(moving)
        moving.wake()

    def _free(self, moving: Moving) -> None:
        """The rank may move again."""
        entry = self.own_entry(moving.log)
        if entry is not None and entry.moving == moving.log.move:
            entry.moving = ""
