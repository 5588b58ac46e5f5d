"""Carries out the target's steps of a move: receives the image, restores it stopped, lets it run with the source's token.

Invariant: see snapshotd/moves/target/settling.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    Denied,
    RankGone,
    Refused,
    SnapshotError,
    Usage,
    Where,
    WrongState,
)
from snapshotd.api.snapshotd_pb2 import AllocateDeviceMemoryRequest as AllocateRequest
from snapshotd.cuda import pairing
from snapshotd.files.as_user import spares
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.keepers.relay import Relays
from snapshotd.moves import job_rules, rules
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.rules import CopyState, Mark, Outcome
from snapshotd.moves.steps import must_be_at, step
from snapshotd.moves.target import (
    arrived_image,
    copies,
    device_memory,
    gpus,
    preparing,
    resumed,
    sealing,
    short_of_memory,
    source,
)
from snapshotd.moves.target.identity import identity_of
from snapshotd.moves.target.restore import Restore
from snapshotd.moves.target.settling import TargetSettling, facts_of
from snapshotd.moves.target.source_signature import SourceSignatures
from snapshotd.moves.target.spare_children import start_keeper, start_spares
from snapshotd.proc import host
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

#: A source that has asked about its move cannot be declared dead for this long.
SOURCE_SEEN_S = 60.0


class TargetSteps(TargetSettling):
    """One instance per daemon."""

    def __init__(self, node: Node, relays: Relays, forwarding: Forwarding) -> None:
        super().__init__(node, relays, forwarding)
        self.restores: dict[str, Restore] = {}  # by move: those at work
        self._choosing = asyncio.Lock()
        self._signatures, self._preparing = SourceSignatures(node.credentials), preparing.Preparing(node)

    async def examine(self, request: pb.ExamineRequest, info: pb.NodeInfo) -> list[pb.Check]:
        """The checks of preflight on this node. Changes nothing."""
        from_image = request.resume or request.changed_files  # the latter before a rollback, while the rank may run
        return list(
            await in_thread(
                preflight.examine,
                request.facts,
                info,
                carry_paths=self.node.config.carry_paths,
                may_replace=self.node.carry.may_replace,
                gpu_wish=request.gpu,
                allow_root=self.node.config.allow_root_ranks,
                memory_id=self.node.room.machine,
                resumes=request.resume,
                changed_files=request.changed_files,
                holds=self.node.config.hold_device_memory and not request.resume,
                disk_bytes=await in_thread(self.node.store.disk_room_bytes) if from_image else 0,
            )
        )

    @step
    async def prepare(self, request: pb.PrepareRequest) -> pb.PrepareReply:
        """Reserves room for the image and returns the nonce from which the source's token is made."""
        check_move_id(request.move)
        with self._preparing.of(request):
            return await self._prepare(request)

    async def _prepare(self, request: pb.PrepareRequest) -> pb.PrepareReply:
        if self.journal.find(request.move) is not None:
            known = self.moving(request.move)
            self.must_be_open(known)
            return _prepared(known.log)
        facts, config = request.facts, self.node.config
        check_rank_uid(facts.rank.uid)
        if request.keep:
            wanted = partial(self._preparing.must_be_wanted, request)
            move_log = await copies.prepare(self.node, self._signatures, request, wanted)
            self.track(move_log)
            return _prepared(move_log)
        identity = identity_of(facts)
        resumes = request.HasField("coordinator")
        if facts.source_node == config.node and not resumes:
            raise Usage("a rank cannot be moved to the node it is on")
        rewires, nodes = await in_thread(resumed.planned, request) if resumes else ([], [])
        if not config.allow_root_ranks and 0 in facts.user_ids:
            raise Refused(
                "root-rank: the rank runs as root, which this node does not allow", remedy=preflight.ROOT_REMEDY
            )
        preparing.must_have_left(self.journal, facts.rank.uid)
        said = pb.Outcome()
        with span("meet source"):
            if resumes:
                resumed.must_be_first(self.moves.values(), facts.rank.uid)
                said = await resumed.check_coordinator(self.node, request)
            else:
                await source.must_answer(self.node, facts.source_node, request)
            sender = request.image_node if resumes and request.image_node else facts.source_node
            await self._signatures.meet(sender, request.source_endpoint)
        await reach(Point.BEFORE_PREPARE)
        comes = preflight.arriving(facts, holds=config.hold_device_memory and not resumes)
        rings_bytes = comes.stripes_bytes if comes.rings else 0
        size_bytes = comes.all_bytes + facts.carried_bytes
        room = resumed.room(self.node, request.move, size_bytes) if resumes else contextlib.nullcontext()
        async with room, self._choosing:  # two moves that begin at the same time get different GPUs
            pairs = await gpus.choose(self.node, request)
            used = {use.uuid for use in facts.gpu.uses}
            if not resumes:
                await in_thread(self.node.store.create, request.move, size_bytes, rings_bytes)
            begin = preparing.begin_of(config, request, sender, facts.rank.user_id)
            await self._preparing.must_be_wanted(request)
            move_log = await in_thread(self.journal.begin, begin)
            reserved = [new for old, new in pairs if old in used]
            await in_thread(
                move_log.mark,
                Mark.PREPARED,
                gpu_pairs=pairs,
                gpus_reserved=reserved,
                gpus_by_index=pairing.keeps_indices(facts.gpu),
                user_ids=sorted(set(facts.user_ids)),
                identity=identity,
                rewires=rewires,
                nodes=nodes,
                from_node=facts.source_node,
                ended_before=said.ended,
                tethered=said.tethered,
                replayed_output=request.replayed_output,
                file_policy=resumed.file_policy(request),
                maker=request.made_on if resumes else "",
                snapshot=request.snapshot if resumes else "",
            )
        self.track(move_log)
        with span("start spares"):
            for needed in (any(fact.carried for fact in facts.files), bool(facts.closed_bytes)):
                if needed:
                    await in_thread(spares.add)
            await start_keeper(config.criu)
            await start_spares()
        await reach(Point.PREPARE)
        return _prepared(move_log)

    @step
    async def open_image_channel(self, request: pb.OpenImageChannelRequest, caller: str) -> pb.OpenImageChannelReply:
        """Opens a port for the images of this move alone, with a key, until they are sealed or dropped."""
        move = request.move
        self.authorise_source(move, caller)
        await reach(Point.RECEIVING)
        source.must_be_sealed(request.sealed, caller)
        async with self.working_on(move, "stream") as moving:
            port, key, endpoints = await in_thread(self.bulk_receivers.open, move, moving.log.begin.source_node)
        return pb.OpenImageChannelReply(port=port, key=key, sealed=True, endpoints=endpoints)

    @step
    async def open_device_channel(self, request: pb.OpenDeviceChannelRequest, caller: str) -> pb.OpenDeviceChannelReply:
        """Opens a port for the offloaded device memory of this move, with a key, until the rank runs here or is dropped."""
        self.authorise_source(request.move, caller)
        source.must_be_sealed(request.sealed, caller)
        async with self.working_on(request.move, "prepare", at={Mark.PREPARED}) as moving:
            return await device_memory.open_channel(self.node, self.device_channels, moving.log, request, caller)

    @step
    async def allocate_device_memory(self, request: AllocateRequest, caller: str) -> pb.AllocateDeviceMemoryReply:
        """The source has handed over the memory of a process: creates the same here, to be filled as it arrives."""
        self.authorise_source(request.move, caller)
        return await device_memory.allocate(self.device_channels, request)

    @step
    async def seal(self, request: pb.SealRequest, caller: str) -> pb.SealReply:
        """The source has sent all files: verifies that they are complete, and those that the source has signed."""
        self.authorise_source(request.move, caller)
        return await sealing.answer(self.moving(request.move), request, partial(self._seal, request))

    async def _seal(self, request: pb.SealRequest, synced: Callable[[int], None]) -> list[str]:
        async with self.working_on(request.move, "stream") as moving:
            with span("check signature"):
                await self._signatures.check(moving.log.begin, request.files, request.signature)
                await in_thread(arrived_image.take_made, self.node, moving.log, request)
            with self.node.store.threads(request.move), span("verify"):
                damaged = await in_thread(self.node.store.seal, request.move, request.files, synced=synced)
                if not damaged:
                    await in_thread(self.bulk_receivers.close, request.move)
            if not damaged and moving.log.last_mark is Mark.PREPARED:
                await in_thread(moving.log.mark, Mark.SEALED)
                await reach(Point.SEAL)
            return damaged

    def authorise_source(self, move: str, caller: str) -> None:
        """Only the source of a move may send its image. Raises Denied."""
        moving = self.moving(move)
        if caller != moving.log.begin.source_node:
            raise Denied(f"{caller} is not the source of move {move}")
        self.must_be_open(moving)

    @step
    async def restore(self, move: str) -> pb.RestoreReply:
        """Restores the tree, stopped. If it fails, nothing of it is left here and the source still has the rank."""
        began, parts = host.boottime_s(), Parts()
        async with self.working_on(move, "restore") as moving:
            if moving.log.last_mark is Mark.HELD:
                if not moving.log.copy_exists():
                    raise RankGone("the restored copy died while it was held", where=Where.SOURCE_FROZEN)
            else:
                must_be_at(moving, {Mark.SEALED}, ", not sealed")
                await self._restore(moving, parts)
                metrics.phase("restore", host.boottime_s() - began)
                log.info("restored rank %s, held", moving.log.begin.rank)
                await reach(Point.RESTORE)
        receipt = rules.proof(moving.log.nonce, "HELD", move)
        record = moving.log.record
        return pb.RestoreReply(
            held_receipt=receipt,
            seconds=host.boottime_s() - began,
            parts=parts.all,
            nccl=bool(record.nccl_processes),
            changed_files=[one.to_proto() for one in record.changed_files],
        )

    async def _restore(self, moving: Moving, parts: Parts) -> None:
        move = moving.log.move
        await reach(Point.BEFORE_RESTORE)
        await in_thread(moving.log.mark, Mark.RESTORING)
        await self.forwarding.make_room(moving.log.begin.rank_uid)
        restore = self.restores[move] = Restore(self.node, moving.log)
        incoming, fills = self.device_channels.find(move), self.device_channels.fills(move)
        with self.node.store.threads(move):
            moving.restoring = asyncio.create_task(restore.run(parts, incoming, fills))
        try:
            held = await short_of_memory.unless(moving)
        except BaseException as error:
            moving.failure = str(error)
            if isinstance(error, SnapshotError):
                error.where = Where.SOURCE_FROZEN  # also where a process of the copy here has ended
            await self.device_channels.close(move)
            await restore.sweep(self.node, moving.log)
            raise
        finally:
            moving.restoring = None
            del self.restores[move]  # it has the keeper's connection, which outlives the move
        await reach(Point.RESTORED)
        await in_thread(moving.log.mark, Mark.HELD, **held)

    @step
    async def activate(self, move: str, token: bytes, *, abandoned: bool = False) -> pb.ActivateReply:
        """With the source's token for COMMIT: lets the copy here run. A copy of a job that is resumed needs no token: its
        coordinator is asked."""
        moving = self.moving(move)
        if moving.log.begin.coordinator:
            async with self.ending(moving, "activate"):
                await self.settle_once(moving)
                return pb.ActivateReply(running=moving.log.last_mark in {Mark.ACTIVATED, Mark.SETTLED})
        if not rules.proves(token, moving.log.nonce, "COMMIT", move):
            raise Denied(
                f"that is not the source's COMMIT token for move {move}",
                remedy="only the source's outcome record gives it",
                where=Where.TARGET_HELD,
            )
        async with self.ending(moving, "activate"):
            await self.learn(moving, Outcome.COMMIT, "the source's token", "source", abandoned=abandoned)
            await self.settle_once(moving)
            return pb.ActivateReply(running=moving.log.last_mark is Mark.ACTIVATED)

    @step
    async def discard(self, move: str, token: bytes, operator: str = "") -> pb.DiscardReply:
        """With the source's token for ABORT: drops the copy here. An operator needs no token to end a move that never
        began: no whole copy is here, and its source does not know it or does not answer."""
        await self._preparing.doubt(check_move_id(move))
        if self.journal.find(move) is None:
            return pb.DiscardReply()
        moving = self.moving(move)
        if moving.log.begin.coordinator:
            async with self.ending(moving, "abort"):
                await self.settle_once(moving)
                return pb.DiscardReply()
        if operator and not token:
            await self._end_unbegun(moving, operator)
            return pb.DiscardReply()
        if not rules.proves(token, moving.log.nonce, "ABORT", move):
            moving.wake()  # a source that never began the move has no nonce for its token: ask it at once
            raise Denied(f"that is not the source's ABORT token for move {move}")
        async with self.ending(moving, "abort"):
            await self.learn(moving, Outcome.ABORT, "the source's token", "source")
            await self.settle_once(moving)
            return pb.DiscardReply()

    async def _end_unbegun(self, moving: Moving, by: str) -> None:
        """Safe without the source's record: it cannot record COMMIT without the receipt for a whole copy."""
        if await source.answers(self.node, moving.log.begin):
            raise WrongState(
                f"the source answers and knows move {moving.log.move}: its record decides", where=Where.UNKNOWN
            )
        async with self.ending(moving, "abort"):
            must_be_at(moving, {Mark.PREPARED, Mark.SEALED, Mark.DISCARDED}, ": it may have a whole copy")
            await self.learn(moving, Outcome.ABORT, "ended by an operator: its source never began it", by)
            await self.settle_once(moving)

    async def copy_state(self, move: str, caller: str) -> pb.Copy:
        """The state of the copy here. A source that asks about a held one may abort the move at once: from then on it cannot
        be declared dead."""
        check_move_id(move)
        found = self.journal.find(move)
        if found is None or found.begin.role != "target":
            return pb.Copy(state=pb.Copy.NO_SUCH_MOVE)
        if found.begin.kind == "copy":
            kept = job_rules.copy_state(found.last_mark, whole=self.node.store.sealed(move))
            return pb.Copy(state=pb.Copy.State.Value(kept.name))
        state = rules.target_answer(facts_of(found))
        if state is CopyState.GONE:  # final only if no step is just about to mark it ACTIVATED
            async with self.moving(move).lock:
                state = rules.target_answer(facts_of(found))
        if state is CopyState.HELD and caller == found.begin.source_node:
            moving = self.moving(move)
            async with moving.lock:  # not while a declaration is examined
                state = rules.target_answer(facts_of(found))
                moving.source_seen_s = host.boottime_s()
        unattached = state is CopyState.HELD and copies.is_unattached(found)
        name = pb.Copy.State.Value(state.name)
        return pb.Copy(state=name, abandoned=found.known.abandoned, unattached=unattached)

    @step
    async def declare_source_dead(self, move: str, by: str) -> pb.ActivateReply:
        """An operator declares that the source is dead: the held copy continues here; an incomplete one is dropped."""
        moving = self.moving(move)
        if moving.log.begin.coordinator:
            raise WrongState(f"{move} resumes a rank with its job: only its coordinator decides", where=Where.UNKNOWN)
        async with self.ending(moving, "recover"):
            if await source.answers(self.node, moving.log.begin):
                raise WrongState(f"the source answers and knows move {move}: it is not dead", where=Where.UNKNOWN)
            since_s = host.boottime_s() - moving.source_seen_s
            if since_s < SOURCE_SEEN_S:
                raise WrongState(
                    f"the source asked about move {move} {since_s:.0f} s ago: it is not dead", where=Where.UNKNOWN
                )
            held = moving.log.last_mark in {Mark.HELD, Mark.ACTIVATED}
            outcome = Outcome.COMMIT if held else Outcome.ABORT
            # No node will rebuild communicators that are down now. Those that are up are not affected.
            await self.learn(moving, outcome, "an operator declared the source dead", by, abandoned=True)
            await self.settle_once(moving)
            return pb.ActivateReply(running=moving.log.last_mark is Mark.ACTIVATED)

    def held(self, move: str) -> Moving | None:
        """The move whose copy is held here: it may neither run nor be dropped yet."""
        moving = self.moves.get(move)
        return moving if moving is not None and copies.is_held(moving) else None

    def must_be_open(self, moving: Moving) -> None:
        super().must_be_open(moving)
        if moving.failure:
            raise WrongState(f"move {moving.log.move} cannot go on: {moving.failure}", where=Where.SOURCE_FROZEN)


def _prepared(move_log: MoveLog) -> pb.PrepareReply:
    pairs = [pb.GpuPair(old_uuid=old, new_uuid=new) for old, new in move_log.record.gpu_pairs]
    finds_blocks = move_log.begin.user_id >= 0
    return pb.PrepareReply(nonce=move_log.nonce, gpu_pairs=pairs, finds_blocks=finds_blocks, keeps_signatures=True)
