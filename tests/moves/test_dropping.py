"""Images of a job that was given up or resumed are dropped on every node that has one, also if some do not answer at first,
and a job of which a node has lost its part can be given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Unreachable, WrongState
from snapshotd.moves.jobs import coordinator, dropping
from snapshotd.moves.jobs.records import is_needed
from snapshotd.moves.rules import Mark
from tests.moves.test_coordinator import FIRST, RECORD, Daemon, resumption, suspension

IMAGES = ["m-000000000010", "m-000000000011"]


class Lossy(Daemon):
    """A coordinator among nodes of which some do not answer."""

    def __init__(self, folder: Path) -> None:
        self.silent: set[str] = set()
        super().__init__(folder)

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        if name in self.silent:
            raise Unreachable(f"{name} does not answer")
        async with super()._client(name, endpoint) as client:
            yield client

    async def commit_resumption(self, images_on: tuple[str, str] = ("node-1", "node-2")) -> None:
        await self.suspend()
        request = resumption(FIRST)
        for part, name in zip(request.participants, images_on, strict=True):
            part.image_node = name
        await self.steps.begin(request)
        self.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.HELD) for move in (32, 33)}
        assert (await self.steps.commit(FIRST)).kind == pb.COMMIT

    def long_ago(self, record: str) -> None:
        """Makes the outcome of a record older than a resumption may take."""
        known = self.journal.get(record)
        assert known.outcome is not None
        known.outcome = msgspec.structs.replace(known.outcome, unix_s=time.time() - 3600)

    def mark(self, record: str) -> Mark:
        return self.journal.get(record).last_mark

    async def waits_for(self, record: str, why: str) -> None:
        """While a round of settling is in progress, no reason is known yet."""
        for _ in range(1200):
            if why in (await self.listed(record)).waiting_for:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{record} does not wait for: {why}")

    async def listed(self, record: str) -> pb.JobRecord:
        return next(job for job in (await self.steps.listed()).jobs if job.record == record)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Lossy]:
    made = Lossy(tmp_path)
    yield made
    await made.stop()


async def test_drop_asks_all_nodes_and_is_finished_when_the_last_one_has_answered(daemon: Lossy) -> None:
    await daemon.suspend()
    daemon.silent = {"node-1"}
    reply = await daemon.steps.drop(RECORD, "given up")
    assert list(reply.waiting_for) == ["images on node-1: node-1 does not answer"]
    assert set(daemon.dropped) == {IMAGES[1]}, "a silent node does not keep the others from being asked"
    record = await daemon.listed(RECORD)
    assert (record.ended_by, record.ended_unix_s) == ("dropped: given up", 0.0)
    await daemon.waits_for(RECORD, "node-1 does not answer")
    daemon.silent = set()
    await daemon.settle(RECORD)
    assert set(daemon.dropped) == daemon.given_up == set(IMAGES)
    assert daemon.mark(RECORD) is Mark.SETTLED
    assert not is_needed(daemon.journal, daemon.journal.get(RECORD))


async def test_drop_goes_on_after_a_restart_of_the_coordinator(daemon: Lossy, tmp_path: Path) -> None:
    await daemon.suspend()
    daemon.silent = {"node-1"}
    await daemon.steps.drop(RECORD, "given up")
    await daemon.stop()
    again = Lossy(tmp_path)
    again.steps.adopt_journal()
    await again.settle(RECORD)
    assert set(again.dropped) == set(IMAGES)
    assert again.mark(RECORD) is Mark.SETTLED
    assert not (await again.steps.drop(RECORD, "again")).waiting_for, "idempotent"
    await again.stop()


async def test_drop_is_answered_while_nodes_are_still_at_work(daemon: Lossy, monkeypatch: pytest.MonkeyPatch) -> None:
    await daemon.suspend()
    at_work = asyncio.Event()

    async def drop(*arguments: Any, **more: Any) -> list[str]:
        await at_work.wait()
        return []

    monkeypatch.setattr(dropping, "drop", drop)
    monkeypatch.setattr(coordinator, "ANSWER_S", 0.05)
    assert list((await daemon.steps.drop(RECORD, "given up")).waiting_for) == [
        "large images: their nodes are still at work"
    ]
    assert daemon.mark(RECORD) is not Mark.SETTLED
    at_work.set()
    await daemon.settle(RECORD)
    assert daemon.mark(RECORD) is Mark.SETTLED


async def test_drop_ends_a_suspension_that_a_node_has_forgotten(daemon: Lossy) -> None:
    await daemon.steps.begin(suspension())
    daemon.stored = {part.move: pb.Outcome(stored=True) for part in suspension().participants}
    await daemon.steps.commit(RECORD)
    daemon.stored = {IMAGES[0]: pb.Outcome(kind=pb.COMMIT, settled=True)}  # node-2 was installed anew
    await daemon.settle(RECORD)
    await daemon.waits_for(RECORD, "rank 1 on node-2 does not know of it")
    assert not (await daemon.steps.drop(RECORD, "given up")).waiting_for
    assert daemon.mark(RECORD) is Mark.SETTLED
    assert set(daemon.dropped) == set(IMAGES)


async def test_a_suspension_that_was_undone_is_not_dropped(daemon: Lossy) -> None:
    await daemon.steps.begin(suspension())
    with pytest.raises(WrongState):
        await daemon.steps.drop(RECORD, "given up")
    await daemon.steps.abort(RECORD, "given up", "test")
    with pytest.raises(WrongState):
        await daemon.steps.drop(RECORD, "given up")
    assert daemon.dropped == []


async def test_resumption_drops_all_images_that_it_can_reach(daemon: Lossy) -> None:
    await daemon.commit_resumption(images_on=("stored-1", "stored-2"))
    daemon.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.RUNNING) for move in (32, 33)}
    daemon.silent = {"stored-1"}
    with pytest.raises(Unreachable, match="images on stored-1: stored-1 does not answer"):
        await daemon.settle(FIRST)
    assert set(daemon.dropped) == {IMAGES[1]}
    daemon.silent = set()
    await daemon.settle(FIRST)
    assert set(daemon.dropped) == set(IMAGES)
    assert daemon.mark(FIRST) is Mark.SETTLED


async def test_a_target_that_has_carried_it_out_may_forget_it(daemon: Lossy, tmp_path: Path) -> None:
    await daemon.commit_resumption()
    daemon.copies = {
        "m-000000000020": pb.Copy(state=pb.Copy.ENDED),
        "m-000000000021": pb.Copy(state=pb.Copy.HELD),
    }
    await daemon.settle(FIRST)
    assert daemon.journal.get(FIRST).whole().done == ["m-000000000020"]
    await daemon.stop()
    again = Lossy(tmp_path)
    again.steps.adopt_journal()
    again.copies = {"m-000000000021": pb.Copy(state=pb.Copy.ENDED)}  # the other one has removed its record
    await again.settle(FIRST)
    assert again.mark(FIRST) is Mark.SETTLED
    assert set(again.dropped) == set(IMAGES)
    await again.stop()


async def test_images_of_a_resumption_that_a_target_has_forgotten_can_be_dropped(daemon: Lossy) -> None:
    await daemon.commit_resumption()
    daemon.copies = {"m-000000000020": pb.Copy(state=pb.Copy.RUNNING)}
    await daemon.settle(FIRST)
    assert daemon.mark(FIRST) is not Mark.SETTLED
    with pytest.raises(Busy, match="is being resumed"):
        await daemon.steps.drop(RECORD, "given up")
    daemon.long_ago(FIRST)
    assert not (await daemon.steps.drop(RECORD, "given up")).waiting_for
    assert set(daemon.dropped) == set(IMAGES)
    assert daemon.given_up == set(), "the job runs: its keepers stay"
    await daemon.settle(FIRST)
    assert daemon.mark(FIRST) is Mark.SETTLED, "nothing is left to wait for"


async def test_records_that_have_ended_are_listed_without_their_participants(daemon: Lossy) -> None:
    """A history of large jobs would not fit into a message. A suspended job is listed with them: they are its images."""
    await daemon.commit_resumption()
    assert (len((await daemon.listed(FIRST)).participants), (await daemon.listed(FIRST)).ranks) == (2, 2)
    daemon.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.RUNNING) for move in (32, 33)}
    await daemon.settle(FIRST)
    for record in (RECORD, FIRST):
        found = await daemon.listed(record)
        assert (list(found.participants), found.ranks) == ([], 2)
