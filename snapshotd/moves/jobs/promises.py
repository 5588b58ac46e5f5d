"""What this node has promised to coordinators of snapshots: whom it follows, for each snapshot of which it keeps images
or is a witness.

Invariant: a node follows one coordinator of a job at a time. It follows another one only if the first has handed the job
over, or has been silent for FENCED_S since this node answered it last: a coordinator that has no promise of a majority for
the shorter CUT_OFF_S has ended its ranks (lease.py). A promise is on the disk before it is given. A daemon that was
restarted, or whose node was, counts from its start.

This assumes that the clocks of two nodes run at about the same speed: within half a minute they differ by less than the
difference of these two times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Former
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.machines import answers
from snapshotd.moves.journal import check_move_id
from snapshotd.moves.node import Node
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.sync import sync_folder

log = logging.getLogger(__name__)

ASK_S = 5.0
#: A promise that was released stays for so long, so that a delayed request does not renew it.
FORGET_S = 3600.0


class Promise(msgspec.Struct, frozen=True):
    """About one snapshot."""

    record: str
    job: str
    rank_uids: list[str]
    quorums: list[list[str]]
    holder: str  # the node that this one follows
    endpoint: str
    promised: bool = False  # in place of another one
    settled: bool = False  # all nodes have confirmed the snapshot
    released: bool = False  # the snapshot was given up: no other node may coordinate it any more


class Promises:
    """One instance per daemon."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._kept: dict[str, Promise] = {}
        self._answered_s: dict[str, float] = {}  # by record: CLOCK_BOOTTIME of the last answer to the holder
        self._started_s = host.boottime_s()
        self.cut_off: Callable[[Collection[str]], str] = lambda ranks: ""  # why this node may not coordinate a job
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by job: its first rank

    def _folder(self) -> Path:
        return self.node.ranks.folder.parent / "promises"

    def recall(self) -> None:
        """At start. Blocking."""
        for path in self._folder().glob("m-*.json"):
            try:
                found = msgspec.json.decode(path.read_bytes(), type=Promise)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                log.error("a promise to a coordinator cannot be read, so none is given again for %s: %s", path, error)
                continue
            self._kept[found.record] = found

    def of(self, record: str) -> Promise | None:
        """The promise about a snapshot that was not given up."""
        known = self._kept.get(record)
        return known if known is not None and not known.released else None

    async def ask(self, request: pb.LeaseRequest, caller: str) -> pb.LeaseReply:
        """Answers a coordinator, or one that wants to be. Idempotent."""
        check_move_id(request.record)
        async with self._locks[min(request.rank_uids, default="")]:
            known = self._kept.get(request.record)
            if known is None and request.begins:
                known = await self._begin(request, caller)
            if known is None:
                return pb.LeaseReply(reason="it knows no coordinator of this snapshot")
            if request.released:
                await self._release(known, caller)
                return pb.LeaseReply(holder=caller)
            if known.released:
                return pb.LeaseReply(reason="the snapshot was given up")
            if known.holder != caller and (why := await self._follow(known, request, caller)):
                return pb.LeaseReply(holder=known.holder, endpoint=known.endpoint, reason=why, settled=known.settled)
            known = await self._renewed(self._kept[request.record], request)
            self._answered_s[request.record] = host.boottime_s()
            return pb.LeaseReply(holder=caller, settled=known.settled)

    async def _begin(self, request: pb.LeaseRequest, caller: str) -> Promise | None:
        """The first promise about a snapshot; None if this node follows another coordinator of the job."""
        if any(one.holder != caller for one in self._of_job(set(request.rank_uids))):
            return None
        made = Promise(
            record=request.record,
            job=request.job,
            rank_uids=list(request.rank_uids),
            quorums=[list(one.nodes) for one in request.quorums],
            holder=caller,
            endpoint=request.endpoint,
        )
        await self._store(made)
        return made

    async def _renewed(self, known: Promise, request: pb.LeaseRequest) -> Promise:
        """What the holder has told since."""
        quorums = [list(one.nodes) for one in request.quorums] or known.quorums
        settled = known.settled or request.settled
        endpoint = request.endpoint or known.endpoint
        fresh = msgspec.structs.replace(known, quorums=quorums, settled=settled, endpoint=endpoint)
        if fresh != known:
            await self._store(fresh)
        return fresh

    def _of_job(self, rank_uids: set[str]) -> list[Promise]:
        return [one for one in self._kept.values() if not one.released and rank_uids & set(one.rank_uids)]

    async def _follow(self, known: Promise, request: pb.LeaseRequest, caller: str) -> str:
        """Follows another coordinator from now on, for all snapshots of the job. Returns why not."""
        mine = [one for one in self._of_job(set(known.rank_uids)) if one.holder != caller]
        for one in mine:
            former = await self._state_of(one, caller)
            if former is Former.SILENT and not request.takes_over:
                return f"{self.node.config.node} follows {one.holder}, which does not answer"
            ago_s = host.boottime_s() - self._answered_s.get(one.record, self._started_s)
            may, why = job_rules.may_promise(former, ago_s, promised_before=one.promised, declared=request.declared)
            if not may:
                return f"{self.node.config.node} follows {one.holder}: {why}"
        for one in mine:
            await self._store(msgspec.structs.replace(one, holder=caller, endpoint=request.endpoint, promised=True))
            log.warning("follows %s instead of %s for snapshot %s of job %s", caller, one.holder, one.record, one.job)
        return ""

    async def _state_of(self, promise: Promise, caller: str) -> Former:
        """What can be found about the holder of a promise."""
        if promise.holder == self.node.config.node:
            known = self.node.journal.find(promise.record)
            if known is None:
                return Former.UNKNOWN
            if await in_thread(self.cut_off, promise.rank_uids):
                return Former.LEFT  # what it had here has ended, and it asks before it decides anything again
            return Former.LEFT if (await in_thread(known.whole)).handed_to == caller else Former.THERE
        try:
            async with self.node.client(promise.holder, promise.endpoint) as client:
                found = await client.job.GetOutcome(pb.MoveRequest(move=promise.record), timeout_s=ASK_S)
        except NotFound:
            return Former.UNKNOWN
        except SnapshotError:
            return Former.THERE if await answers(promise.endpoint, if_unknown=True) else Former.SILENT
        return Former.LEFT if found.handed_to == caller else Former.THERE

    async def _release(self, known: Promise, caller: str) -> None:
        if known.holder == caller and not known.released:
            await self._store(msgspec.structs.replace(known, released=True))

    async def sweep(self) -> None:
        """Releases promises about snapshots that their coordinator has given up while this node did not answer."""
        for one in list(self._kept.values()):
            if one.released:
                await in_thread(self._forget, one)
                continue
            try:
                async with self.node.client(one.holder, one.endpoint) as client:
                    found = await client.job.GetOutcome(pb.MoveRequest(move=one.record), timeout_s=ASK_S)
                over = bool(found.dropped) or found.kind == pb.ABORT
            except NotFound:
                over = host.boottime_s() - self._answered_s.get(one.record, self._started_s) > FORGET_S
            except SnapshotError:
                over = False
            if over:
                async with self._locks[min(one.rank_uids)]:
                    if (now := self._kept.get(one.record)) is not None and now.holder == one.holder:
                        await self._store(msgspec.structs.replace(now, released=True))

    def _forget(self, promise: Promise) -> None:
        path = self._folder() / f"{promise.record}.json"
        try:
            old = time.time() - path.stat().st_mtime > FORGET_S
        except FileNotFoundError:
            old = True
        if old:
            path.unlink(missing_ok=True)
            self._kept.pop(promise.record, None)
            self._answered_s.pop(promise.record, None)

    async def _store(self, promise: Promise) -> None:
        def write() -> None:
            folder = self._folder()
            folder.mkdir(mode=0o700, exist_ok=True)
            stored.write(folder / f"{promise.record}.json", msgspec.json.encode(promise))
            sync_folder(folder)

        await in_thread(write)
        self._kept[promise.record] = promise
