"""A preparation that is still in progress when its attempt is undone leaves nothing behind, and is in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, WrongState
from snapshotd.moves.journal import Journal
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import preparing, settling
from snapshotd.moves.target.restore import Restore
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.transport.image.spill import SpillingStore

FIRST, NEXT = "m-000000000001", "m-000000000002"
RANK = "night-0-00000001"


class Place:
    """A target, the coordinator of its job, and a wait in the middle of each preparation."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: set[str] = set()  # records
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()
        config = SimpleNamespace(
            node="node-3",
            advertise="127.0.0.1:1",
            listen="127.0.0.1:1",
            data_addresses=(),
            allow_root_ranks=False,
            hold_device_memory=False,
            state_dir=folder,
            criu="/bin/true",
        )
        reserve = Reserve(folder, 4096)
        self.journal = Journal(folder / "state", reserve)
        self.store = SpillingStore(folder / "images")
        node: Any = SimpleNamespace(
            config=config,
            credentials=None,
            reserve=reserve,
            journal=self.journal,
            store=self.store,
            holder=None,
            client=self._client,
        )

        async def nothing(*_: Any) -> None:
            return None

        async def choose(*_: Any) -> list[tuple[str, str]]:
            self.began.set()
            await self.goes_on.wait()
            return []

        for name in ("start_spares", "start_keeper"):
            monkeypatch.setattr(f"snapshotd.moves.target.steps.{name}", nothing)
        monkeypatch.setattr("snapshotd.moves.target.steps.gpus.choose", choose)
        monkeypatch.setattr(settling, "start_spares_later", lambda _: None)
        monkeypatch.setattr("snapshotd.moves.target.settling.hold.let_go", lambda *_: None)
        monkeypatch.setattr(Restore, "sweep", staticmethod(self._sweep))
        forwarding: Any = SimpleNamespace(hold_again=lambda uid: None)
        self.steps = TargetSteps(node, SimpleNamespace(), forwarding)  # type: ignore[arg-type]
        self.steps._signatures = SimpleNamespace(meet=nothing)  # type: ignore[assignment]

    async def _sweep(self, node: Any, move_log: Any) -> None:
        self.store.drop(move_log.move)

    @contextlib.asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def outcome(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            return pb.Outcome(kind=pb.ABORT if request.move in self.ended else pb.UNDECIDED, reason="undone")

        assert name == "node-1"
        yield SimpleNamespace(job=SimpleNamespace(GetOutcome=outcome))

    def prepare(self, move: str) -> asyncio.Task[pb.PrepareReply]:
        facts = pb.RankFacts(rank=pb.Rank(uid=RANK, job="night", user_id=1500), source_node="node-2")
        facts.identity.CopyFrom(pb.Identity(user_id=1500, group_id=1500))
        request = pb.PrepareRequest(
            move=move,
            facts=facts,
            source_endpoint="e",
            coordinator=pb.Coordinator(record=record(move), node="node-1", endpoint="e"),
            ranks=[pb.ResumedRank(rank_uid=RANK, from_node="node-2", to_node="node-3")],
            image_node="node-2",
        )
        return asyncio.create_task(self.steps.prepare(request))

    def undo(self, move: str) -> asyncio.Task[pb.DiscardReply]:
        return asyncio.create_task(self.steps.discard(move, b""))


def record(move: str) -> str:
    return move.replace("m-0", "m-b")


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    place = Place(tmp_path, monkeypatch)
    yield place
    for moving in place.steps.moves.values():
        if moving.settling is not None:
            moving.settling.cancel()


async def test_preparation_of_an_attempt_that_is_undone_meanwhile_is_refused(place: Place) -> None:
    late = place.prepare(FIRST)
    await place.began.wait()
    place.ended.add(record(FIRST))
    undone = place.undo(FIRST)
    for _ in range(10):  # it has begun
        await asyncio.sleep(0)
    assert not undone.done(), "what it leaves is not known yet"
    place.goes_on.set()
    with pytest.raises(WrongState, match=f"{record(FIRST)} has ended: undone"):
        await late
    await undone
    assert place.journal.find(FIRST) is None
    assert not place.store.moves(), "its room is free"
    await place.prepare(NEXT)
    assert place.steps.moving(NEXT).log.last_mark is Mark.PREPARED


async def test_preparation_that_hangs_is_refused_when_it_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "WAIT_S", 0.01)
    late = place.prepare(FIRST)
    await place.began.wait()
    place.ended.add(record(FIRST))
    await place.undo(FIRST)
    place.goes_on.set()
    with pytest.raises(WrongState):
        await late
    assert place.journal.find(FIRST) is None


async def test_attempt_that_its_coordinator_has_not_ended_goes_on(place: Place) -> None:
    """Whatever a node, or a driver, says."""
    late = place.prepare(FIRST)
    await place.began.wait()
    undone = place.undo(FIRST)
    place.goes_on.set()
    assert (await late).nonce
    await undone
    assert place.steps.moving(FIRST).log.last_mark is Mark.PREPARED


async def test_preparation_that_was_journalled_just_before_is_dropped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = place.journal.begin

    def beginning(*arguments: Any) -> Any:
        place.ended.add(record(FIRST))
        loop.call_soon_threadsafe(lambda: tasks.append(place.undo(FIRST)))
        return begin(*arguments)

    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[pb.DiscardReply]]()
    place.goes_on.set()
    with monkeypatch.context() as racing:
        racing.setattr(place.journal, "begin", beginning)
        await place.prepare(FIRST)
    await tasks[0]
    assert place.steps.moving(FIRST).log.last_mark is Mark.DISCARDED
    await place.prepare(NEXT)


async def test_one_move_is_not_prepared_twice_at_the_same_time(place: Place) -> None:
    first = place.prepare(FIRST)
    await place.began.wait()
    with pytest.raises(Busy, match="is being prepared already"):
        await place.prepare(FIRST)
    place.goes_on.set()
    nonce = (await first).nonce
    assert (await place.prepare(FIRST)).nonce == nonce, "its answer was lost"
