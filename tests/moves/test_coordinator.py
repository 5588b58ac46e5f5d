"""The coordinator's records: COMMIT needs every rank, a job is resumed once, and the record of a suspended job is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, NotFound, Refused, Undone, Unreachable, Usage, WrongState
from snapshotd.moves.jobs import participants
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.records import is_needed
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark

RECORD, FIRST, SECOND = (f"m-{number:012x}" for number in (1, 2, 3))


class Daemon:
    """A coordinator, and the other daemons, which answer what the test says."""

    def __init__(self, folder: Path) -> None:
        self.stored: dict[str, pb.Outcome] = {}
        self.copies: dict[str, pb.Copy] = {}
        self.dropped: list[str] = []
        self.given_up: set[str] = set()  # images of ranks that never run again
        self.ended: list[tuple[str, str]] = []
        config = SimpleNamespace(node="node-1", advertise="10.0.0.1:7070", job_snapshots=True)
        self.journal = Journal(folder)
        node: Any = SimpleNamespace(config=config, journal=self.journal, client=self._client)
        self.put_back: list[str] = []  # records whose gates were opened
        communicators: Any = SimpleNamespace(put_back=self._put_back)
        self.steps = JobSteps(node, communicators)

    async def _put_back(self, moving: Moving) -> pb.AttachReply:
        self.put_back.append(moving.log.move)
        return pb.AttachReply()

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def outcome(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            if request.move not in self.stored:
                raise NotFound("no such move")
            return self.stored[request.move]

        async def copy(request: pb.MoveRequest, timeout_s: float) -> pb.Copy:
            return self.copies.get(request.move, pb.Copy(state=pb.Copy.NO_SUCH_MOVE))

        async def drop(request: pb.DropImageRequest, timeout_s: float) -> pb.DropImageReply:
            self.dropped.append(request.image)
            self.given_up |= {request.image} if request.given_up else set()
            return pb.DropImageReply()

        async def end(request: pb.EndRanksRequest, timeout_s: float) -> pb.EndRanksReply:
            self.ended += [(request.incarnation, uid) for uid in request.rank_uids]
            return pb.EndRanksReply()

        yield SimpleNamespace(
            source=SimpleNamespace(GetOutcome=outcome, DropImage=drop),
            target=SimpleNamespace(GetCopy=copy),
            job=SimpleNamespace(EndRanks=end),
        )

    async def stop(self) -> None:
        for moving in list(self.steps.moves.values()):
            if moving.settling is not None:
                moving.settling.cancel()
                await asyncio.gather(moving.settling, return_exceptions=True)

    async def suspend(self) -> None:
        await self.steps.begin(suspension())
        self.stored = {part.move: pb.Outcome(stored=True) for part in suspension().participants}
        assert (await self.steps.commit(RECORD)).kind == pb.COMMIT
        self.stored = {move: pb.Outcome(kind=pb.COMMIT, settled=True) for move in self.stored}
        await self.settle(RECORD)

    async def settle(self, record: str) -> None:
        moving = self.steps.moving(record)
        async with moving.lock:
            await self.steps.settle_once(moving)


def part(rank: int, move: int, image: int = 0) -> pb.Participant:
    here: dict[str, Any] = {"node": f"node-{rank + 1}", "endpoint": "e", "image_node": "node-1", "image_endpoint": "e"}
    stored = f"m-{image:012x}" if image else ""
    return pb.Participant(rank_uid=f"train-{rank}", rank=rank, move=f"m-{move:012x}", image=stored, **here)


def suspension() -> pb.BeginJobRequest:
    return pb.BeginJobRequest(
        record=RECORD, job="train", user_id=7, participants=[part(0, 16), part(1, 17)], lease_s=30
    )


def resumption(record: str, moves: tuple[int, int] = (32, 33)) -> pb.BeginJobRequest:
    parts = [part(0, moves[0], 16), part(1, moves[1], 17)]
    return pb.BeginJobRequest(record=record, job="train", user_id=7, suspension=RECORD, participants=parts, lease_s=30)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    await made.stop()


async def test_commit_is_refused_until_every_rank_is_stored(daemon: Daemon) -> None:
    await daemon.steps.begin(suspension())
    daemon.stored = {"m-000000000010": pb.Outcome(stored=True), "m-000000000011": pb.Outcome()}
    with pytest.raises(Undone, match="rank 1 on node-2 is not ready"):
        await daemon.steps.commit(RECORD)
    assert (await daemon.steps.outcome(RECORD)).kind == pb.UNDECIDED
    assert (await daemon.steps.abort(RECORD, "given up", "test")).kind == pb.ABORT
    assert (await daemon.steps.commit(RECORD)).kind == pb.ABORT, "the outcome is written once"


async def test_images_are_dropped_only_when_every_rank_runs(daemon: Daemon) -> None:
    await daemon.suspend()
    await daemon.steps.begin(resumption(FIRST))
    daemon.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.HELD) for move in (32, 33)}
    assert (await daemon.steps.commit(FIRST)).kind == pb.COMMIT
    daemon.copies["m-000000000020"] = pb.Copy(state=pb.Copy.RUNNING)
    await daemon.settle(FIRST)
    assert daemon.dropped == []
    daemon.copies["m-000000000021"] = pb.Copy(state=pb.Copy.RUNNING)
    await daemon.settle(FIRST)
    assert daemon.dropped == ["m-000000000010", "m-000000000011"]
    assert daemon.steps.moving(FIRST).log.last_mark is Mark.SETTLED


async def test_a_resumption_of_which_a_copy_died_before_it_ran_is_taken_back(daemon: Daemon) -> None:
    await daemon.suspend()
    await daemon.steps.begin(resumption(FIRST))
    daemon.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.HELD) for move in (32, 33)}
    assert (await daemon.steps.commit(FIRST)).kind == pb.COMMIT
    daemon.copies = {
        "m-000000000020": pb.Copy(state=pb.Copy.RUNNING),
        "m-000000000021": pb.Copy(state=pb.Copy.GONE),
    }
    await daemon.settle(FIRST)
    assert (await daemon.steps.outcome(FIRST)).kind == pb.ABORT
    await daemon.settle(FIRST)
    assert set(daemon.ended) == {(FIRST, "train-0"), (FIRST, "train-1")}
    with pytest.raises(Busy, match="may still run"):
        await daemon.steps.begin(resumption(SECOND, (34, 35)))
    daemon.copies = {
        "m-000000000020": pb.Copy(state=pb.Copy.ENDED),
        "m-000000000021": pb.Copy(state=pb.Copy.DISCARDED),
    }
    await daemon.settle(FIRST)
    assert daemon.steps.moving(FIRST).log.last_mark is Mark.SETTLED
    assert daemon.dropped == [], "the images are the job again"
    await daemon.stop()
    daemon.steps.moves.pop(FIRST, None)  # what the settle loop does at its end
    await daemon.steps.begin(resumption(SECOND, (34, 35)))


async def test_a_job_is_resumed_once(daemon: Daemon) -> None:
    with pytest.raises(NotFound):
        await daemon.steps.begin(resumption(FIRST))
    await daemon.suspend()
    answers = await asyncio.gather(
        daemon.steps.begin(resumption(FIRST)), daemon.steps.begin(resumption(SECOND, (34, 35))), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [pb.BeginJobReply, Busy]
    daemon.copies = {f"m-{move:012x}": pb.Copy(state=pb.Copy.HELD) for move in (32, 33)}
    assert (await daemon.steps.commit(FIRST)).kind == pb.COMMIT
    with pytest.raises(WrongState):
        await daemon.steps.begin(resumption(SECOND, (34, 35)))
    with pytest.raises(Busy, match="is being resumed"):
        await daemon.steps.drop(RECORD, "test")


async def test_an_attempt_that_was_undone_does_not_count(daemon: Daemon) -> None:
    await daemon.suspend()
    await daemon.steps.begin(resumption(FIRST))
    await daemon.steps.abort(FIRST, "given up", "test")
    await daemon.steps.begin(resumption(SECOND, (34, 35)))
    listed = {job.record: job for job in (await daemon.steps.listed()).jobs}
    assert (listed[RECORD].ended_by, listed[FIRST].outcome, listed[SECOND].outcome) == ("", pb.ABORT, pb.UNDECIDED)


async def test_all_ranks_of_the_suspension_are_resumed(daemon: Daemon) -> None:
    await daemon.suspend()
    request = resumption(FIRST)
    del request.participants[1]
    with pytest.raises(Usage):
        await daemon.steps.begin(request)


async def test_records_of_a_suspended_job_are_needed(daemon: Daemon) -> None:
    await daemon.suspend()
    record = daemon.journal.get(RECORD)
    assert is_needed(daemon.journal, record)
    await daemon.steps.drop(RECORD, "test")
    assert not is_needed(daemon.journal, record)
    assert daemon.dropped == ["m-000000000010", "m-000000000011"]


async def test_restarted_coordinator_keeps_what_it_has_recorded(daemon: Daemon, tmp_path: Path) -> None:
    await daemon.steps.begin(suspension())
    again = Daemon(tmp_path)
    again.steps.adopt_journal()
    again.stored = {move.move: pb.Outcome(stored=True) for move in suspension().participants}
    assert (await again.steps.commit(RECORD)).kind == pb.COMMIT
    await again.stop()
    assert Journal(tmp_path).get(RECORD).committed


async def test_snapshots_are_refused_where_they_are_switched_off(daemon: Daemon) -> None:
    daemon.steps.node.config.job_snapshots = False  # type: ignore[misc]
    begin = suspension()
    begin.snapshot = True
    with pytest.raises(Refused, match="switched off on node-1") as refused:
        await daemon.steps.begin(begin)
    assert "remove `job_snapshots = false`" in refused.value.advice
    assert daemon.journal.all() == []
    await daemon.steps.begin(suspension())  # suspensions lie on disks, and not in memory


async def test_a_target_that_does_not_answer_does_not_keep_copies_on_others_running(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await daemon.suspend()
    await daemon.steps.begin(resumption(SECOND))
    reached: list[str] = []

    @asynccontextmanager
    async def client(name: str, endpoint: str) -> AsyncIterator[Any]:
        async def end(request: pb.EndRanksRequest, timeout_s: float) -> pb.EndRanksReply:
            if name == "node-1":
                raise Unreachable("no answer")
            reached.append(name)
            return pb.EndRanksReply()

        yield SimpleNamespace(job=SimpleNamespace(EndRanks=end))

    monkeypatch.setattr(daemon.steps.node, "client", client)
    with pytest.raises(Unreachable):
        await participants.end_copies(daemon.steps.node, daemon.journal.get(SECOND))
    assert reached == ["node-2"]


async def test_resumption_is_not_committed_while_a_copy_lacks_its_communicators(daemon: Daemon) -> None:
    await daemon.suspend()
    await daemon.steps.begin(resumption(FIRST))
    moves = [part.move for part in resumption(FIRST).participants]
    daemon.copies = {move: pb.Copy(state=pb.Copy.HELD) for move in moves}
    daemon.copies[moves[1]].unattached = True
    with pytest.raises(Undone, match="rank 1 on node-2 is not ready"):
        await daemon.steps.commit(FIRST)
    daemon.copies[moves[1]].unattached = False
    assert (await daemon.steps.commit(FIRST)).kind == pb.COMMIT


@pytest.mark.parametrize("nccl", [False, True])
async def test_record_is_not_settled_before_the_gates_are_open(daemon: Daemon, nccl: bool) -> None:
    request = suspension()
    request.nccl = nccl
    await daemon.steps.begin(request)
    await daemon.steps.abort(RECORD, "given up", "test")
    daemon.stored = {part.move: pb.Outcome(kind=pb.ABORT) for part in request.participants}
    await daemon.settle(RECORD)
    assert daemon.put_back == [], "ranks are not thawed yet"
    daemon.stored = {part.move: pb.Outcome(kind=pb.ABORT, settled=True) for part in request.participants}
    await daemon.settle(RECORD)
    assert set(daemon.put_back) == ({RECORD} if nccl else set())
    assert daemon.journal.get(RECORD).last_mark is Mark.SETTLED
