"""The steps of a resumption: one function for each call of its table. `bring_back` repeats them from other images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from migrator.cluster import Cluster
from migrator.driver.peers import node_addresses, node_infos
from migrator.fan_out import ASK_TIMEOUT_S
from migrator.find_rank import find_node
from migrator.image_copies import copies_of
from migrator.job_protocol import RESUME, UNDO_RESUME, JobVerdict
from migrator.job_results import BadImage, ChangedFile, JobOptions, JobResult, RankPlace, UnreadableImage, UnsentImage
from migrator.jobs import connections, homes, places
from migrator.jobs.connections import Sockets
from migrator.jobs.walk import JobRun, drive, each, new_id
from migrator.results import Event
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone, SnapshotError, Undone, Unreadable, Usage, Where

#: The target's check that it is not the source: a rank may be resumed where it was.
_TARGET_NODE = "target-node"


class Resumption(JobRun):
    table, undo, success = RESUME, UNDO_RESUME, JobVerdict.RESUMED
    untouched = "suspended; its images are whole"

    def __init__(
        self,
        cluster: Cluster,
        options: JobOptions,
        coordinator: str,
        record: pb.JobRecord,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(cluster, options, record.job, record.user_id, on_event)
        self.coordinator, self.suspended = coordinator, record
        unknown = sorted(set(options.on) - {part.rank for part in record.participants})
        if unknown:
            raise Usage(
                f"job {record.job} has no rank {unknown[0]}",
                remedy=f"its ranks are: {', '.join(str(part.rank) for part in record.participants)}",
            )
        self.participants = [self._participant(part) for part in record.participants]
        self.images: dict[str, pb.StoredImage] = {}  # by rank uid
        self.makers = {
            part.rank_uid: part.made_on for part in record.participants
        }  # of a snapshot; empty: does not sign
        self.nonces: dict[str, bytes] = {}  # by move
        self.failed: list[BadImage] = []  # the images for which the attempt was given up

    def _participant(self, part: pb.Participant) -> pb.Participant:
        target = self.options.on.get(part.rank, part.node)
        return pb.Participant(
            rank_uid=part.rank_uid,
            rank=part.rank,
            move=new_id(),
            node=target,
            endpoint=find_node(self.cluster, target),
            image=part.move,
            image_node=part.node,
            image_endpoint=part.endpoint,
        )

    @property
    def suspension(self) -> str:
        return self.suspended.record

    @property
    def changed(self) -> str:
        """What is done with files that have changed. A job that was suspended has changed none since."""
        return self.options.changed_files if self.suspended.kind == "rollback" else ""

    @property
    def steps(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        return {
            "Source.GetImage": self.read_images,
            "Target.Examine": self.examine,
            "Job.Begin": self.begin_job,
            "Target.Prepare": self.prepare,
            "Source.Send": self.send,
            "Target.Restore": self.restore,
            "Job.Attach": self.attach,
            "Job.Commit": self.commit_job,
            "Target.Activate": self.activate,
            "Target.Discard": self.discard,
        }

    def places(self) -> list[RankPlace]:
        return [RankPlace(part.rank, part.rank_uid, part.node, part.image_node) for part in self.participants]

    async def read_images(self, timeout_s: float) -> None:
        """Of a job that was rolled back, each rank has the image or one of its copies."""
        infos = await node_infos(self.cluster)
        self.nodes = await node_addresses(self.cluster, infos)
        copies = {part.rank_uid: copies_of(part) for part in self.suspended.participants}
        unreadable, unsent = {one.image for one in self.unreadable}, {one.image for one in self.unsent}
        again = {one.rank for one in self.unreadable} | {one.rank for one in self.unsent}

        async def ask(part: pb.Participant) -> None:
            own = pb.ImageCopy(move=part.image, node=part.image_node, endpoint=part.image_endpoint)
            others: list[SnapshotError] = []
            for one in places.in_order([own, *copies[part.rank_uid]], infos, unreadable, unsent):
                try:
                    await read(part, one)
                    if part.rank in again:
                        self.reporter.note(f"rank {part.rank}: using the image on {part.image_node} now")
                    return
                except Unreadable as error:
                    self.unreadable.append(self._unreadable(part, error))
                except SnapshotError as error:
                    others.append(error)
            if not any(one.rank == part.rank for one in self.unreadable):
                raise others[-1]
            why = [error.headline for error in others]
            raise places.none_left(self.job, part.rank, self.unreadable, why, Where.SUSPENDED)

        async def read(part: pb.Participant, place: pb.ImageCopy) -> None:
            part.image, part.image_node, part.image_endpoint = place.move, place.node, place.endpoint
            client = await self.client(part.image_node)
            found = await client.source.GetImage(pb.MoveRequest(move=part.image), timeout_s=timeout_s)
            self.must_be(part, part.image_node, found.facts.rank)
            self._must_be_made_by(part, found.facts.source_node)
            self.images[part.rank_uid] = found

        await each(self.participants, ask)
        for part in self.participants:
            rank = self.images[part.rank_uid].facts.rank
            part.home_node, part.home_endpoint = rank.home_node, rank.home_endpoint

    def _must_be_made_by(self, part: pb.Participant, said: str) -> None:
        maker = self.makers[part.rank_uid]
        if maker and said != maker:
            raise Unreadable(f"it says that {said[:80]} has made it, and {maker} has", where=Where.SUSPENDED)
        if self.suspended.kind == "rollback" and not maker and part.image_node != said:
            self.warnings.append(
                f"rank {part.rank}: {said} has made the image with an older version, and has not signed the copy on"
                f" {part.image_node}: that node could have changed it"
            )

    def _unreadable(self, part: pb.Participant, error: Unreadable) -> UnreadableImage:
        return UnreadableImage(part.rank, part.image_node, part.image, error.message)

    async def _each_image(self, ask: Callable[[pb.Participant], Awaitable[None]], *, sends: bool = False) -> None:
        """Asks for all ranks, also after an image was of no use: the next attempt has to know all that are. `sends`: the node
        that has the image is asked, and not the target."""
        failed: list[tuple[BadImage, SnapshotError]] = []

        async def one(part: pb.Participant) -> None:
            try:
                await ask(part)
            except Unreadable as error:
                self.unreadable.append(self._unreadable(part, error))
                failed.append((self.unreadable[-1], error))
            except SnapshotError as error:
                of_the_way = places.is_of_the_way(error, part.image_node, part.node, sends=sends)
                if not of_the_way or not await self._answers(part.node):
                    raise
                self.unsent.append(
                    UnsentImage(part.rank, part.image_node, part.image, error.headline, target=part.node)
                )
                failed.append((self.unsent[-1], error))
                if not self._untried(part):
                    self.failed = [bad for bad, _ in failed]
                    raise  # no other attempt follows, so nothing is gained by what the other ranks still send

        await each(self.participants, one)
        if failed:
            self.failed = [bad for bad, _ in failed]
            raise failed[0][1]

    def _untried(self, part: pb.Participant) -> bool:
        """Whether the rank has an image that has not failed yet."""
        kept = next(one for one in self.suspended.participants if one.rank_uid == part.rank_uid)
        failed = {one.image for one in (*self.unreadable, *self.unsent)}
        return any(image not in failed for image in (kept.move, *(copy.move for copy in copies_of(kept))))

    async def _answers(self, node: str) -> bool:
        with contextlib.suppress(SnapshotError):
            await (await self.client(node)).node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)
            return True
        return False

    async def examine(self, timeout_s: float) -> None:
        checks: list[tuple[str, pb.Check]] = []
        suspended = {part.rank_uid: self.images[part.rank_uid].facts.rank for part in self.participants}
        # After a loss the home node may be the one that was lost, and rollback.py has looked at what is left.
        needed = self.suspended.kind != "rollback"
        kept, silent = await homes.kept_on(self.cluster, [one.home_node for one in suspended.values() if needed])

        async def ask(part: pb.Participant) -> None:
            facts = self.images[part.rank_uid].facts
            request = pb.ExamineRequest(facts=facts, resume=True, changed_files=self.changed)
            reply = await (await self.client(part.node)).target.Examine(request, timeout_s=timeout_s)
            name = f"rank {part.rank} on {part.node}"
            stays = part.node in {part.image_node, self.images[part.rank_uid].facts.source_node}
            checks.extend((name, check) for check in reply.checks if not (stays and check.name == _TARGET_NODE))
            if needed:
                checks.append((f"rank {part.rank}", homes.check(suspended[part.rank_uid], kept, silent)))

        await each(self.participants, ask)
        self.refuse_if(checks)

    async def prepare(self, timeout_s: float) -> None:
        by_uid = {part.rank_uid: part for part in self.participants}
        made_on = {uid: self.images[uid].facts.source_node for uid in by_uid}  # another node may send the image
        seen = connections.of_each({uid: Sockets(made_on[uid], self.images[uid].rewires) for uid in by_uid})

        async def ask(part: pb.Participant) -> None:
            ranks = [
                pb.ResumedRank(rank_uid=uid, from_node=made_on[uid], to_node=by_uid[uid].node, rewires=rewires)
                for uid, rewires in seen[part.rank_uid].items()
            ]
            request = pb.PrepareRequest(
                move=part.move,
                facts=self.images[part.rank_uid].facts,
                source_endpoint=part.image_endpoint,
                coordinator=self.coordinates,
                nodes=self.nodes,
                ranks=ranks,
                image_node=part.image_node,
                replayed_output=self.options.replayed_output,
                changed_files=self.changed,
                made_on=self.makers[part.rank_uid],
                snapshot=self.suspended.snapshot,
            )
            reply = await (await self.client(part.node)).target.Prepare(request, timeout_s=timeout_s)
            self.nonces[part.move] = reply.nonce

        await self._each_image(ask)  # the target asks the node that has the image for its certificate

    async def send(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.SendRequest(
                image=part.image,
                move=part.move,
                target_node=part.node,
                target_endpoint=part.endpoint,
                nonce=self.nonces[part.move],
            )
            async for progress in (await self.client(part.image_node)).source.Send(request, timeout_s=timeout_s):
                self.sent("send", part.move, progress)

        await self._each_image(ask, sends=True)

    async def restore(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.MoveRequest(move=part.move)
            reply = await (await self.client(part.node)).target.Restore(request, timeout_s=timeout_s)
            self.nccl = self.nccl or reply.nccl
            self.add_parts(reply.parts)
            self.changed_files += [
                ChangedFile(part.rank, one.path, one.change, one.action, one.beside, one.text)
                for one in reply.changed_files
            ]

        await self._each_image(ask)

    async def activate(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            client = await self.client(part.node)
            reply = await client.target.Activate(pb.TokenRequest(move=part.move), timeout_s=timeout_s, retry=True)
            if not reply.running:
                raise RankGone(f"rank {part.rank} on {part.node} has not run yet", where=Where.TARGET_HELD)

        await each(self.participants, ask)

    async def discard(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            client = await self.client(part.node)
            await client.target.Discard(pb.TokenRequest(move=part.move), timeout_s=timeout_s)
            copy = await client.target.GetCopy(pb.MoveRequest(move=part.move), timeout_s=timeout_s)
            if copy.state not in {pb.Copy.DISCARDED, pb.Copy.NO_SUCH_MOVE}:
                state = pb.Copy.State.Name(copy.state).lower()
                raise Undone(f"its copy is not dropped yet: {state}", where=Where.UNKNOWN)

        await self.each_confirms(ask)


async def bring_back(
    cluster: Cluster,
    options: JobOptions,
    coordinator: str,
    record: pb.JobRecord,
    on_event: Callable[[Event], None],
    unreadable: Sequence[UnreadableImage] = (),
) -> JobResult:
    """Resumes a job. An attempt in which an image turns out to be unreadable, or does not arrive, is undone, and repeated
    with the next copy (`places.goes_on`). Raises Unreadable if a rank has none left. Raises other errors only if the first
    attempt could not begin: that of a later one is in the result, with what those before have found. `unreadable`: images
    that are known to be of no use."""
    began, known, unsent, undone = time.monotonic(), list(unreadable), list[UnsentImage](), list[JobResult]()
    kept = {part.rank: [part.move, *(copy.move for copy in copies_of(part))] for part in record.participants}
    while True:
        run = Resumption(cluster, options, coordinator, record, on_event)
        run.began, run.unreadable, run.unsent = began, list(known), list(unsent)
        try:
            result = await drive(run)
        except Unreadable:  # it names what was tried
            raise
        except SnapshotError as error:
            if not undone:
                raise
            return _not_begun(undone[-1], run, error)
        undone.append(result)
        if result.outcome is not JobVerdict.UNDONE or not run.failed:
            return result
        found: list[BadImage] = [*run.unreadable[len(known) :], *run.unsent[len(unsent) :]]
        for bad in found:
            run.reporter.note(bad.text)
        known, unsent, options = run.unreadable, run.unsent, replace(options, record="")
        failed = [(one.rank, one.image) for one in run.failed]
        late = options.timeout_s is not None and time.monotonic() - began >= options.timeout_s
        if late or not places.goes_on(failed, kept, [one.image for one in known], [one.image for one in unsent]):
            tried = "; ".join(one.text for one in unsent)
            return replace(result, reason=tried) if len(unsent) > 1 else result


def _not_begun(before: JobResult, run: Resumption, error: SnapshotError) -> JobResult:
    """The job is as the attempt before has left it."""
    return replace(
        before,
        seconds=time.monotonic() - run.began,
        reason=f"{before.reason}; tried again: {error.message}" if before.reason else error.message,
        error_code=error.code,
        remedy=error.advice,
        unreadable_images=run.unreadable,
        unsent_images=run.unsent,
    )
