"""Suspends and resumes jobs for the autopilot, through the code of `migrator job`, and settles interrupted attempts.

Invariant: only what is recorded as intended is begun, and nothing is concluded from a missing answer. Only jobs that the
autopilot has suspended itself are resumed; one that others have resumed or dropped meanwhile is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from migrator import jobs
from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank, lacks_place
from migrator.autopilot.policy import Policy
from migrator.autopilot.preempt import held_places
from migrator.autopilot.store import Store
from migrator.autopilot.suspending import in_progress, to_resume
from migrator.autopilot.suspension import BUSY, Suspension, SuspensionState
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult
from migrator.jobs.finding import all_jobs
from migrator.jobs.walk import new_id
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError

log = logging.getLogger(__name__)

_SUSPENDING, _SUSPENDED = SuspensionState.SUSPENDING, SuspensionState.SUSPENDED
_RESUMING, _RESUMED = SuspensionState.RESUMING, SuspensionState.RESUMED
#: How often nodes are asked whether a suspended job still is: an operator can resume or drop it.
LOOK_S = 5.0


class Suspender:
    """One for each engine. `changed` gets the nodes where something has changed."""

    def __init__(
        self, cluster: Cluster, policy: Policy, store: Store, changed: Callable[[Collection[str]], None]
    ) -> None:
        self.cluster, self.policy, self.store, self._changed = cluster, policy, store, changed
        self.tasks: dict[str, asyncio.Task[None]] = {}  # by the id of the suspension
        self._looked_s = float("-inf")

    # ---------------------------------------------------------------- suspending

    async def begin(self, planned: Suspension) -> None:
        """Records the intent, and only then begins."""
        one = replace(planned, id=new_id(), intended_unix_s=self.store.now())
        await self.store.intend_suspension(one)
        self.tasks[one.id] = asyncio.create_task(self._suspend(one))

    async def _suspend(self, one: Suspension) -> None:
        # With its ranks: the user may have started another job of the same name since it was planned.
        options = JobOptions(one.job, one.user_id, uids=frozenset(rank.uid for rank in one.ranks), record=one.id)
        try:
            result = await jobs.suspend(self.cluster, options, lambda event: None)
        except SnapshotError as error:
            await self._not_suspended(one, error.message)
        else:
            if result.outcome is JobVerdict.SUSPENDED:
                await self._is_suspended(one, {place.uid: place.node for place in result.ranks})
            elif result.outcome is JobVerdict.UNKNOWN:
                await self._note_unknown(one, result)
            else:
                await self._not_suspended(one, result.reason)
        self._changed(one.nodes)

    async def _is_suspended(self, one: Suspension, places: Mapping[str, str]) -> None:
        ranks = tuple(replace(rank, node=places.get(rank.uid, rank.node)) for rank in one.ranks)
        await self.store.change_suspension(
            one.id, {_SUSPENDING}, state=_SUSPENDED, suspended_unix_s=self.store.now(), ranks=ranks
        )

    async def _not_suspended(
        self, one: Suspension, why: str, state: SuspensionState = SuspensionState.NOT_SUSPENDED
    ) -> None:
        await self.store.change_suspension(one.id, {_SUSPENDING}, state=state, result=why)

    async def _note_unknown(self, one: Suspension, result: JobResult) -> None:
        await self.store.note("unknown", f"job {one.job_key}: {result.reason}", node=one.node, id=one.id)

    # ---------------------------------------------------------------- resuming

    async def about(self, world: World, decided: Sequence[AboutRank], *, idle: bool) -> dict[str, str]:
        """Resumes a suspended job if there is room for it. `idle`: nothing else was begun in this round. Returns alerts."""
        alerts: dict[str, str] = {}
        now, begun = self.store.now(), not idle or in_progress(world) is not None
        waiting = [one for one in world.suspensions if one.state is _SUSPENDED]
        for one in sorted(waiting, key=lambda one: (-self._priority(one), one.intended_unix_s)):
            mine = self._priority(one)
            others = [about for about in decided if self.policy.job_for(about.rank).priority >= mine]
            held = held_places(world, [about.rank for about in others], now)
            targets, reason = to_resume(
                world, self.policy, one, now, first=self._goes_first(world, mine, others, now), held=held
            )
            if targets and not begun:
                await self._begin_to_resume(one, targets)
                begun = True
            elif not targets:
                alerts[f"job {one.job_key}"] = f"{one.reason}; {reason}"
        return alerts

    def _priority(self, one: Suspension) -> int:
        return self.policy.job_for(one.as_ranks()[0]).priority

    def _goes_first(self, world: World, priority: int, decided: Sequence[AboutRank], now: float) -> str:
        """A rank of a higher priority that waits for a place."""
        moving = {move.rank_uid for move in world.running}
        for about in decided:
            rank = about.rank
            on_its_way = rank.moving or rank.uid in moving or about.decision is RankDecision.MOVE
            if self.policy.job_for(rank).priority <= priority or on_its_way:
                continue
            if about.decision is RankDecision.WAIT or lacks_place(world, self.policy, about, now):
                return f"rank {rank.rank} of {rank.job}"
        return ""

    async def _begin_to_resume(self, one: Suspension, targets: Mapping[str, str]) -> None:
        ranks = tuple(replace(rank, target=targets[rank.uid]) for rank in one.ranks)
        intended = replace(one, state=_RESUMING, resumption=new_id(), ranks=ranks, result="")
        values = {"state": _RESUMING, "resumption": intended.resumption, "ranks": ranks, "result": ""}
        if await self.store.change_suspension(one.id, {_SUSPENDED}, **values):
            self.tasks[one.id] = asyncio.create_task(self._resume(intended))

    async def _resume(self, one: Suspension) -> None:
        on = {rank.rank: rank.target for rank in one.ranks}
        try:
            # By its record: the user may have started another job of the same name.
            options = JobOptions(one.id, one.user_id, on=on, record=one.resumption)
            result = await jobs.resume(self.cluster, options, lambda event: None)
        except NotFound:
            log.info("job %s is not suspended any more", one.job_key)  # `settle` finds out who has resumed it
        except SnapshotError as error:
            await self._not_resumed(one, error.message)
        else:
            if result.outcome is JobVerdict.RESUMED:
                await self._is_resumed(one, self.store.now())
            elif result.outcome is JobVerdict.UNKNOWN:
                await self._note_unknown(one, result)
            else:
                await self._not_resumed(one, result.reason)
        self._changed({*one.nodes, *on.values()})

    async def _is_resumed(self, one: Suspension, ended_unix_s: float) -> None:
        await self.store.change_suspension(one.id, {_SUSPENDED, _RESUMING}, state=_RESUMED, ended_unix_s=ended_unix_s)

    async def _not_resumed(self, one: Suspension, why: str, *, failed: bool = True) -> None:
        counted = {"failures": one.failures + 1, "failed_unix_s": self.store.now()} if failed else {}
        await self.store.change_suspension(one.id, {_RESUMING}, state=_SUSPENDED, result=why, **counted)

    # ---------------------------------------------------------------- after a restart

    async def settle(self) -> None:
        """Finds out about attempts that no task of this process drives, and about jobs that others have resumed."""
        for number, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[number]
                task.result()
        found = [one for one in await self.store.suspensions(float("inf")) if one.id not in self.tasks]
        due = time.monotonic() >= self._looked_s + LOOK_S
        if not any(one.state in BUSY for one in found) and not (found and due):
            return
        entries, silent = await all_jobs(self.cluster)
        self._looked_s = time.monotonic()  # a silent node is waited for: the next look is later than that
        for one in found:
            # Any node can invent a record. The coordinator is one of the nodes that have ranks of the job.
            known = {entry.record.record: entry.record for entry in entries if entry.node in one.nodes}
            if await self._settle(one, known, complete=not (one.nodes & silent.keys())):
                self._changed(one.nodes)

    async def _settle(self, one: Suspension, known: Mapping[str, pb.JobRecord], *, complete: bool) -> bool:
        """Records what the nodes know of one. `complete`: all that could know of it have answered. Returns whether anything
        was found out."""
        record = known.get(one.id)
        if record is None:
            if not complete:
                return False
            if one.state is _SUSPENDING:
                why = "no daemon knows it: it was interrupted before it began"
                await self._not_suspended(one, why, SuspensionState.NEVER_BEGAN)
            else:
                await self._over(one, "its nodes do not know it any more: it was resumed or dropped by others")
            return True
        if record.outcome == pb.ABORT:
            why = record.reason or "it was undone"
            if one.state is _SUSPENDING:
                await self._not_suspended(one, why)
            else:
                await self._over(one, f"its suspension was taken back, and it runs: {why}")
            return True
        if record.outcome != pb.COMMIT:
            return False  # the coordinator, whose driver is gone, undoes it when its lease expires
        if one.state is _SUSPENDING:
            await self._is_suspended(one, {part.rank_uid: part.node for part in record.participants})
            return True
        if record.ended_by and record.ended_by == one.resumption:
            return await self._settle_resumed(one, known)
        if record.ended_by:
            dropped = record.ended_by.startswith("dropped")
            await self._over(one, record.ended_by if dropped else f"resumed by others ({record.ended_by})")
            return True
        return one.state is _RESUMING and await self._settle_resuming(one, known, complete=complete)

    async def _settle_resumed(self, one: Suspension, known: Mapping[str, pb.JobRecord]) -> bool:
        resumed = known.get(one.resumption)
        ended = resumed.ended_unix_s if resumed is not None else 0.0
        await self._is_resumed(one, ended if one.intended_unix_s <= ended <= self.store.now() else self.store.now())
        return True

    async def _settle_resuming(self, one: Suspension, known: Mapping[str, pb.JobRecord], *, complete: bool) -> bool:
        """The job is still suspended, as far as its coordinator knows."""
        attempt = known.get(one.resumption)
        if attempt is None:
            if complete:
                await self._not_resumed(one, "the attempt was interrupted before it began", failed=False)
            return complete
        if attempt.outcome == pb.ABORT:
            await self._not_resumed(one, attempt.reason or "it was undone")
            return True
        return False

    async def _over(self, one: Suspension, why: str) -> None:
        state = SuspensionState.OVER
        await self.store.change_suspension(one.id, {_SUSPENDED, _RESUMING}, state=state, result=why)
