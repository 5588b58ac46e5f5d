"""Wires the parts of the daemon together, starts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import Channel
from snapshotd.api.errors import SnapshotError
from snapshotd.api.methods import PUSH
from snapshotd.api.servicers import (
    GateServicer,
    HomeServicer,
    JobServicer,
    NodeServicer,
    PeerServicer,
    SourceServicer,
    TargetServicer,
)
from snapshotd.config import Config
from snapshotd.criu import parsers, session
from snapshotd.cuda.driver import Gpus
from snapshotd.diagnosis.run import Diagnosis
from snapshotd.files.as_user import spares
from snapshotd.health.monitor import Monitor
from snapshotd.holder.backed import BackedHolder
from snapshotd.inprocess import devmem, symbols
from snapshotd.keepers.adoption import Adoption
from snapshotd.keepers.listener import KeeperLinks
from snapshotd.keepers.quota import Limits
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.keepers.relay import Relays
from snapshotd.moves import stopping
from snapshotd.moves.carry import Carry
from snapshotd.moves.history import History
from snapshotd.moves.jobs import replicas
from snapshotd.moves.jobs.communicators import JobCommunicators
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.home_keepers import HomeKeepers
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.jobs.succession import Succession
from snapshotd.moves.jobs.tether import Tether
from snapshotd.moves.jobs.watch import Watch
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.kept_files import KeptFiles
from snapshotd.moves.memory_watch import MemoryWatch
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.nccl.gates import GateSteps
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.peers.steps import PeerSteps
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.target import copies, waiting_keepers
from snapshotd.moves.target.gpus import with_reservations
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.moves.where import where_of
from snapshotd.net import addresses
from snapshotd.network.dispatch import Context, Services
from snapshotd.proc import host
from snapshotd.proc.memory import guests_room
from snapshotd.proc.room import Room
from snapshotd.progress.sampler import Sampler
from snapshotd.runtime import faults, metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device import ring
from snapshotd.transport.image.grpc_channel import push_handler
from snapshotd.transport.image.spill import KEY, SpillDisk, SpillingStore
from snapshotd.transport.image.store import ImageStore

log = logging.getLogger(__name__)


#: How long the description of this node waits for NVML. Less than other nodes wait for it, because they need the addresses in
#: it: a sick GPU, on which NVML hangs, must not make the whole node seem silent.
GLANCE_S = 2.0
#: How long the start waits for the disk of snapshots, on which images of before a boot may have to be removed.
DISK_S = 30.0


def _spill_disk(config: Config) -> tuple[SpillDisk | None, str]:
    """The disk for images that have no room in memory, or why there is none. A disk that fails must not keep the daemon from
    starting: ranks may wait for it."""
    if not config.snapshot_spill_dir:
        return None, ""
    try:
        return SpillDisk.within(Path(config.snapshot_spill_dir), DISK_S), ""
    except SnapshotError as error:
        log.error("%s is not used: %s", KEY, error.message)
        return None, error.message


class Daemon:
    """All parts of the daemon, behind the network process. `connect` opens a connection to the daemon of (node, endpoint)."""

    def __init__(self, config: Config, connect: Callable[[str, str], Channel]) -> None:
        faults.arm(config.run_dir)
        symbols.builds.keep_in(config.state_dir)
        session.open_programs(config.criu)
        room = Room(config.memory_claims_dir, config.node)
        disk, why = _spill_disk(config)
        store = SpillingStore(config.image_dir, disk, why, room=room)
        suspended = ImageStore(config.state_dir / "suspended", on_disk=True)
        carry = Carry(config.state_dir, config.carry_paths)
        self.gpus = Gpus(config.gpu_library_dir, config.run_dir / "gpus.json")
        reserve = Reserve(config.state_dir)
        reserve.hold()
        journal, ranks = Journal(config.state_dir, reserve), Ranks(config.state_dir, reserve)
        self.holder = BackedHolder(config.run_dir / "holder.sock")
        self.kept_files = KeptFiles(config.run_dir / "files.sock")
        parts = (store, suspended, carry, self.gpus, room, self.holder, self.kept_files)
        self.node = Node(config, journal, reserve, ranks, *parts, connect, self._lost)
        store.known_blocks.images_for = partial(replicas.images_for, self.node)
        self.relays = Relays(self.node)
        self.peer = PeerSteps(self.node)
        self.gates = GateSteps(self.node)
        self.home_keepers = HomeKeepers(journal, self.relays.report_end)
        self.members = Members(
            self.gates,
            lambda move: self.target.held(move),
            lambda record: copies.held_of(self.target.moves.values(), record),
        )
        communicators = Communicators(self.node, self.members)
        self.jobs = JobSteps(self.node, JobCommunicators(communicators))
        self.images = StoredImages(self.node, self.home_keepers)
        self.endings = Endings(self.node)
        self.tether, self.watch = Tether(self.node, self.endings), Watch(self.node, self.jobs, self.images)
        self.source = SourceSteps(self.node, self.peer.pending, communicators)
        self.forwarding = Forwarding(self.node, self.source.departure.forwarded)
        self.target = TargetSteps(self.node, self.relays, self.forwarding)
        self.succession = Succession(self.node, self.jobs, self.images, self.source, self.target, self.endings)
        self.adoption = Adoption(self.node, self.source, self.target, self.relays, self.forwarding)
        self.history = History(self.node, [self.source, self.target, self.peer, self.gates, self.jobs])
        self.diagnosis = Diagnosis(self.node)
        self.health = Monitor(
            config.node, config.state_dir, config.health, config.gpu_library_dir, lambda: self._running_moves() > 0
        )
        self.progress = Sampler(
            self.node.ranks.all, lambda: self._running_moves() > 0, config.health.progress_interval_s
        )
        self.memory_watch = MemoryWatch(room, self.source, self.target)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = Limits.within(config.ranks_per_user, descriptors)
        self.keepers = KeeperLinks(config.keeper_socket, self.adoption.adopt, self.adoption.events(), limits)
        metrics.watch(
            ranks=lambda: sum(1 for entry in self.node.ranks.all() if not entry.away_node),
            image_bytes=lambda: store.held_bytes(),
        )

    async def _lost(self, entry: RankEntry) -> None:
        await self.adoption.lost(entry)

    async def start(self, services: Services) -> None:
        """Registers the servicers and takes up what was unfinished before a restart."""
        parts = (self.images, self.diagnosis, self.health, self.progress)
        services.add("Node", NodeServicer(self.node, self.peer, self.gates, self.info, self.move_record, *parts))
        services.add("Source", SourceServicer(self.source, self.images))
        services.add("Target", TargetServicer(self.target, self.info))
        services.add("Peer", PeerServicer(self.peer, self.forwarding))
        services.add("Gate", GateServicer(self.gates, self.members))
        services.add("Home", HomeServicer(self.relays))
        services.add("Job", JobServicer(self.jobs, self.endings, self.succession))

        async def authorise(context: Context, move: str) -> None:
            self.target.authorise_source(move, context.caller.name)
            await faults.reach(faults.Point.RECEIVING)

        services.add_plain(PUSH, push_handler(self.node.store, authorise))
        self.source.adopt_journal()
        self.peer.adopt_journal()
        await self.target.adopt_journal()
        await self.members.adopt_copies()
        self.gates.adopt_journal()
        self.jobs.adopt_journal()
        await in_thread(self.jobs.promises.recall)
        await in_thread(self.jobs.leases.recall)
        await in_thread(self.images.adopt)
        self.home_keepers.adopt()
        await in_thread(self._sweep_filters)
        await self.adoption.sweep()  # before any settling: a dead keeper ends a move
        await self.endings.sweep()
        self.source.settle_all()
        await self.keepers.start()
        self.history.start()
        self.tether.repeated.start()
        self.succession.repeated.start()
        self.watch.repeated.start()
        self.health.start()
        self.memory_watch.start()
        self.progress.start()
        self._recalling = asyncio.create_task(self._recall_forwardings(), name="recall forwardings")

    def _sweep_filters(self) -> None:
        """Drops filters of moves that have ended: a daemon that was killed may have left them."""
        unsettled = [moving.log for steps in (self.source, self.target, self.peer) for moving in steps.moves.values()]
        tables = {table for move_log in unsettled for table in connections.tables_of(move_log)}
        try:
            connections.sweep(tables)
        except SnapshotError as error:  # a machine without packet filters has none to drop
            log.info("packet filters were not checked: %s", error.message)

    async def _recall_forwardings(self) -> None:
        """Publishes again where ranks are, and applies stored forwardings: a node may have missed it, or a rank may have
        ended meanwhile."""
        for entry in self.node.ranks.all():
            if entry.role == "guest" and not entry.moving:
                self.forwarding.publish(entry)
        await self.forwarding.recall()

    async def stop(self, grace_s: float) -> None:
        """Stops the daemon. Undoes moves without an outcome first, so that no rank stays frozen until the next start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await stopping.undo_all(self.source, self.jobs)
        for steps in (self.source, self.target, self.peer, self.gates, self.jobs):
            for moving in steps.moves.values():
                if moving.settling is not None:
                    moving.settling.cancel()
        self._recalling.cancel()
        await self.memory_watch.stop()
        await self.tether.repeated.stop()
        await self.succession.repeated.stop()
        await self.watch.repeated.stop()
        await self.health.stop()
        await self.progress.stop()
        await self.history.stop()
        await self.adoption.stop()
        await self.home_keepers.stop()
        await in_thread(self.target.bulk_receivers.close_all)
        await in_thread(self.diagnosis.close)
        await self.target.device_channels.close_all()
        self.forwarding.stop()
        await self.relays.stop()
        await self.keepers.stop()
        await self.gpus.close()
        await in_thread(self.holder.close)
        await in_thread(self.kept_files.close)
        await in_thread(spares.close)
        await in_thread(parsers.spares.close)
        await in_thread(waiting_keepers.close)

    async def info(self, *, fresh: bool = False) -> pb.NodeInfo:
        """Describes this node; its GPUs as they were up to a second ago, unless `fresh`."""
        config = self.node.config
        if fresh:
            await in_thread(self.node.store.dropped)
        held = await in_thread(self.node.store.held_bytes)
        inventory = await self.gpus.inventory(fresh=fresh, at_most_s=None if fresh else GLANCE_S)
        own = await in_thread(addresses.of_this_node)
        return pb.NodeInfo(
            name=config.node,
            endpoint=config.advertise,
            version=host.DAEMON_VERSION,
            boot_id=host.boot_id(),
            kernel=host.kernel(),
            architecture=host.architecture(),
            criu_version=config.criu_version,
            memory_available_bytes=await in_thread(self._memory_for_ranks),
            image_capacity_bytes=await in_thread(self.node.store.capacity_bytes),
            image_held_bytes=held,
            ranks=sum(1 for entry in self.node.ranks.all() if not entry.away_node),
            moves_running=self._running_moves(),
            cpu_features=host.cpu_features(),
            addresses=[address for address, _ in own],
            interfaces=[interface for _, interface in own],
            gpus=with_reservations(self.node.journal, inventory.gpus),
            driver_version=inventory.driver_version,
            gpu_problem=inventory.problem,
            now_unix_s=time.time(),
            protocol=protocol.own(),
            device_window_bytes=ring.memory_bytes(devmem.STRIPES) if config.hold_device_memory else 0,
        )

    def _memory_for_ranks(self) -> int:
        """Not limited by this daemon's own cgroups, which are not charged with a rank. What this daemon itself needs for a
        move is reserved when it begins (snapshotd/transport/image/store.py)."""
        return min(self.node.room.free(own_groups=False).bytes, guests_room()[1])

    def _running_moves(self) -> int:
        running = [moving for steps in (self.source, self.target) for moving in steps.moves.values()]
        return sum(1 for moving in running if not moving.log.ended_unix_s)

    def move_record(self, move_log: MoveLog) -> pb.MoveRecord:
        begin, outcome = move_log.begin, move_log.outcome
        moving = (self.source if begin.role == "source" else self.target).moves.get(begin.move)
        ended = move_log.ended_unix_s
        return pb.MoveRecord(
            move=begin.move,
            role=begin.role,
            rank_uid=begin.rank_uid,
            job=begin.job,
            rank=begin.rank,
            source_node=begin.source_node,
            source_endpoint=begin.source_endpoint,
            target_node=begin.target_node,
            target_endpoint=begin.target_endpoint,
            mark=move_log.last_mark,
            outcome=pb.OutcomeKind.Value(outcome.outcome.value) if outcome else pb.UNDECIDED,
            reason="; ".join(filter(None, (outcome.reason, move_log.known.failure))) if outcome else "",
            decided_by=outcome.decided_by if outcome else "",
            begun_unix_s=begin.begun_unix_s,
            ended_unix_s=ended,
            where=where_of(move_log).value,
            bytes=move_log.known.sent_bytes,
            pause_s=move_log.known.pause_s,
            predicted_s=move_log.known.predicted_s,
            handed_over_bytes=move_log.known.handed_over_bytes,
            waiting_for="" if ended or moving is None else moving.waiting_for,
            user_id=begin.user_id if begin.user_id >= 0 else None,
            coordinator=begin.coordinator,
        )
