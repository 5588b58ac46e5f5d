"""The steps of a snapshot: those of a suspension, except that the ranks go on, and that their buddies get copies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from migrator.cluster import Cluster
from migrator.find_rank import Found
from migrator.image_copies import copies_of, nodes_of, set_copies
from migrator.job_protocol import SNAPSHOT, UNDO_SNAPSHOT, JobVerdict
from migrator.job_results import JobOptions, RankPlace
from migrator.jobs.buddies import choose, stand_ins, witnesses
from migrator.jobs.suspend import Suspension
from migrator.jobs.walk import each, new_id
from migrator.results import Event
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Full, SnapshotError, Undone, Where

#: How long the confirmation is waited for before all nodes are asked again.
CONFIRMED_S = 5.0
LOOK_S = 0.1


class Snapshot(Suspension):
    table, undo, success = SNAPSHOT, UNDO_SNAPSHOT, JobVerdict.SNAPSHOTTED
    untouched = "running, as before; an earlier snapshot is kept"
    takes_snapshot = True

    def __init__(
        self,
        cluster: Cluster,
        options: JobOptions,
        found: Sequence[Found],
        coordinator: str,
        on_event: Callable[[Event], None],
        asked_copies: int = 0,
    ) -> None:
        """`asked_copies`: the number that was asked for with the job's last snapshot, or before. It stays until another one
        is asked for: without that, a job would be protected less than its user believes."""
        super().__init__(cluster, options, found, coordinator, on_event)
        self.asked_copies = options.copies or asked_copies
        self.incarnations = [one.rank.incarnation for one in found]
        self.facts: dict[str, pb.RankFacts] = {}  # by rank uid
        self.prepared: dict[str, pb.PrepareReply] = {}  # by move
        self.frozen_s = 0.0

    @property
    def steps(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        return {
            **super().steps,
            "Target.Prepare": self.prepare,
            "Source.Send": self.send,
            "Job.Attach": self.reattach,
            "Target.Activate": self.keep,
            "Job.GetOutcome": self.confirm,
            "Target.Discard": self.discard,
        }

    def places(self) -> list[RankPlace]:
        return [
            RankPlace(part.rank, part.rank_uid, part.node, copies=tuple(nodes_of(part))) for part in self.participants
        ]

    @property
    def copied_bytes(self) -> int:
        return sum(self.bytes[copy.move][0] for _, copy in self.copies if copy.move in self.bytes)

    @property
    def copies(self) -> list[tuple[pb.Participant, pb.ImageCopy]]:
        """All copies of all ranks."""
        return [(part, copy) for part in self.participants for copy in copies_of(part)]

    def inspected(self, part: pb.Participant, reply: pb.InspectReply) -> None:
        self.facts[part.rank_uid] = reply.facts
        part.made_on = part.node if reply.signs_images else ""

    async def inspect(self, timeout_s: float) -> None:
        await super().inspect(timeout_s)
        count = self.asked_copies or self.cluster.snapshot_copies
        usable = sorted(self.answering)
        chosen = choose([part.node for part in self.participants], usable, self.cluster.labels, count)
        for part, buddies, incarnation in zip(self.participants, chosen, self.incarnations, strict=True):
            places = [(one, self.cluster.nodes[one]) for one in buddies]
            set_copies(part, [pb.ImageCopy(move=new_id(), node=node, endpoint=endpoint) for node, endpoint in places])
            part.incarnation = incarnation
        nodes = [part.node for part in self.participants] + [copy.node for _, copy in self.copies]
        keepers = list(dict.fromkeys([self.coordinator, *nodes]))
        infos = self.answering
        fitting = [node for node in usable if protocol.common(infos[node].protocol, protocol.own()) is not None]
        self.witnesses = witnesses(keepers, fitting, count, self.cluster.labels)
        if len(self.witnesses) < len(witnesses(keepers, usable, count)):
            unfit = [node for node in usable if node not in fitting]
            self.warnings.append(
                f"{', '.join(unfit)} cannot have a vote on job {self.job}, because of another version of snapshotd: it may"
                " wait for an operator when a node is lost. Install the same version there, then take another snapshot"
            )
        if self.witnesses:
            self.stand_ins = stand_ins([*keepers, *self.witnesses], fitting, self.cluster.labels)

    async def prepare(self, timeout_s: float) -> None:
        """Room on the buddies is reserved while the job runs: if there is none, nothing is paused."""

        async def ask(one: tuple[pb.Participant, pb.ImageCopy]) -> None:
            part, copy = one
            request = pb.PrepareRequest(
                move=copy.move,
                facts=self.facts[part.rank_uid],
                source_endpoint=part.endpoint,
                coordinator=self.coordinates,
                keep=True,
            )
            client = await self.client(copy.node)
            try:
                self.prepared[copy.move] = await client.target.Prepare(request, timeout_s=timeout_s)
            except Full as error:
                raise self._full(copy.node, error) from error

        await each(self.copies, ask)
        self.unsigned_on = sorted(
            {copy.node for part, copy in self.copies if part.made_on and not self.prepared[copy.move].keeps_signatures}
        )
        if self.unsigned_on:
            self.warnings.append(
                f"a rollback will refuse the copies on {', '.join(self.unsigned_on)}: an older version of snapshotd runs"
                " there, which does not keep what the rank's node has signed. Install the new version there, then take a"
                " snapshot"
            )

        self._warn_of_old_nodes()

    def _warn_of_old_nodes(self) -> None:
        """They keep images of ranks that share device memory as they keep others, and cannot open that memory again."""
        needs = {part.rank_uid: self.facts[part.rank_uid].protocol for part in self.participants}
        too_old = sorted(
            {
                copy.node
                for part, copy in self.copies
                if protocol.carries_shared_memory(needs[part.rank_uid])
                and protocol.common(needs[part.rank_uid], self.answering[copy.node].protocol) is None
            }
        )
        if too_old:
            self.warnings.append(
                f"a rollback will refuse {', '.join(too_old)} for ranks whose processes share device memory: snapshotd there"
                " is too old for that. Install the new version there"
            )

    def _full(self, node: str, error: Full) -> Full:
        ranks = [str(part.rank) for part, copy in self.copies if copy.node == node]
        count = len(copies_of(self.participants[0]))
        each_has = f"of {count} for each rank, " if count > 1 else ""
        return Full(
            f"{node} is to keep {len(ranks)} of the copies ({each_has}here of rank {', '.join(ranks)}), beside those of the"
            f" snapshot before: {error.message}",
            remedy=f"{error.advice}, or add nodes" + (", or ask for fewer --copies" if count > 1 else ""),
            where=Where.UNTOUCHED,
        )

    async def freeze(self, timeout_s: float) -> None:
        self.frozen_s = self.frozen_s or time.monotonic()
        await super().freeze(timeout_s)

    async def quiesce(self, timeout_s: float) -> None:
        self.frozen_s = time.monotonic()
        await super().quiesce(timeout_s)

    async def store(self, timeout_s: float) -> None:
        await super().store(timeout_s)
        self.pause_s = time.monotonic() - self.frozen_s

    async def reattach(self, timeout_s: float) -> None:
        """As a step of the table. As part of an undo it is `put_back`."""
        if self.undoing:
            await self.put_back(timeout_s)
        else:
            await self.attach(timeout_s)
            self.pause_s = time.monotonic() - self.frozen_s

    async def send(self, timeout_s: float) -> None:
        """All copies of a rank at once: the snapshot counts when the last one is there. None before all images are whole:
        what another rank has as well is found on its node, and not sent."""
        ends_s = time.monotonic() + timeout_s

        async def await_image(part: pb.Participant) -> None:
            request = pb.SendRequest(image=part.move, only_wait=True)
            async for progress in (await self.client(part.node)).source.Send(request, timeout_s=timeout_s):
                self.add_parts(progress.parts)

        async def ask(one: tuple[pb.Participant, pb.ImageCopy]) -> None:
            part, copy = one
            request = pb.SendRequest(
                image=part.move,
                move=copy.move,
                target_node=copy.node,
                target_endpoint=copy.endpoint,
                nonce=self.prepared[copy.move].nonce,
                offer_blocks=self.prepared[copy.move].finds_blocks,
            )
            left_s = max(0.1, ends_s - time.monotonic())
            async for progress in (await self.client(part.node)).source.Send(request, timeout_s=left_s):
                self.sent("copy", copy.move, progress)
                self.add_parts(progress.parts)

        await each([part for part in self.participants if part.made_on == part.node], await_image)  # others are older
        await each(self.copies, ask)

    async def keep(self, timeout_s: float) -> None:
        async def ask(one: tuple[pb.Participant, pb.ImageCopy]) -> None:
            part, copy = one
            client = await self.client(copy.node)
            reply = await client.target.Activate(pb.TokenRequest(move=copy.move), timeout_s=timeout_s, retry=True)
            if not reply.running:
                raise Undone(f"the copy of rank {part.rank} on {copy.node} is not kept yet")

        await each(self.copies, ask)

    async def confirm(self, timeout_s: float) -> None:
        """A snapshot counts for its user only when the job can be rolled back to it: all ranks are bound to its coordinator,
        and a majority of the nodes that have a vote knows that, so that another node may take over. Those that do not know
        it then are named: the loss of another one might leave no majority."""
        ends = time.monotonic() + min(timeout_s, CONFIRMED_S)
        while not (found := await self.outcome()).settled or found.not_told:
            if time.monotonic() > ends:
                break
            await asyncio.sleep(LOOK_S)
        if not found.settled:
            raise Undone(f"not all nodes have confirmed it: {found.reason}", where=Where.SOURCE_RUNNING)
        self.warnings += [
            f"{node} has a vote on job {self.job}, and has not promised {self.coordinator} to follow it: as long as that is"
            " so, the job may wait for an operator if another node is lost. Start snapshotd of this version there and see"
            f" that {self.coordinator} reaches it, or take another snapshot, which gives the vote to a node that answers"
            for node in found.not_told
        ]

    async def outcome(self) -> pb.Outcome:
        client = await self.client(self.coordinator)
        return await client.job.GetOutcome(pb.MoveRequest(move=self.record), timeout_s=CONFIRMED_S)

    async def discard(self, timeout_s: float) -> None:
        async def ask(one: tuple[pb.Participant, pb.ImageCopy]) -> None:
            _, copy = one
            with contextlib.suppress(SnapshotError):  # a daemon that does not answer now asks the coordinator later
                client = await self.client(copy.node)
                await client.target.Discard(pb.TokenRequest(move=copy.move), timeout_s=timeout_s)

        await each(self.copies, ask)
