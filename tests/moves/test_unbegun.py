"""Moves that their source never began: they are not taken up, and what was prepared for them ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, NotFound, SnapshotError, Unreachable, WrongState
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.peers.steps import PeerSteps
from snapshotd.moves.record import Begin, OutcomeRecord
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.target import settling, spare_children, waiting_keepers
from snapshotd.moves.target.restore import Restore
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.proc import host

MOVE = "m-0123456789ab"
SILENT = Unreachable("node-9 does not answer")
UNKNOWN = NotFound("no such move")


def outcome(moving: Moving) -> OutcomeRecord | None:
    return moving.log.outcome


class Other:
    """Another daemon: source and target of the move at once, with the answers that a test sets."""

    def __init__(self) -> None:
        self.outcome: pb.Outcome | SnapshotError = UNKNOWN
        self.copy: pb.Copy | SnapshotError = pb.Copy(state=pb.Copy.NO_SUCH_MOVE)
        self.source = SimpleNamespace(GetOutcome=self._get_outcome)
        self.target = SimpleNamespace(GetCopy=self._get_copy)

    async def _get_outcome(self, request: pb.MoveRequest, **_: Any) -> pb.Outcome:
        assert request.move == MOVE
        if isinstance(self.outcome, SnapshotError):
            raise self.outcome
        return self.outcome

    async def _get_copy(self, request: pb.MoveRequest, **_: Any) -> pb.Copy:
        if isinstance(self.copy, SnapshotError):
            raise self.copy
        return self.copy


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def node(tmp_path: Path, other: Other) -> Any:
    @contextlib.asynccontextmanager
    async def client(name: str, endpoint: str) -> AsyncIterator[Other]:
        yield other

    config = SimpleNamespace(
        node="spare-1",
        state_dir=tmp_path,
        image_dir=tmp_path / "images",
        advertise="127.0.0.1:1",
        listen="127.0.0.1:1",
        data_addresses=(),
        allow_root_ranks=True,
        connection_users=(),
        credentials=None,
    )
    reserve = Reserve(tmp_path, 4096)
    return SimpleNamespace(
        config=config,
        reserve=reserve,
        credentials=None,
        journal=Journal(tmp_path / "moves", reserve),
        ranks=SimpleNamespace(all=list, get=lambda *_: None),
        holder=SimpleNamespace(drop=lambda keys: None, leave=lambda user: None, kept=dict),
        store=SimpleNamespace(
            drop_soon=lambda move: None,
            path=lambda move: tmp_path / move,
            threads=lambda move: contextlib.nullcontext(),
        ),
        client=client,
    )


def description() -> pb.MoveDescription:
    return pb.MoveDescription(
        move=MOVE,
        rank_uid="job-0-01234567",
        job="job",
        source_node="node-9",
        source_endpoint="10.0.0.9:1",
        target_node="spare-1",
        target_endpoint="10.0.0.3:1",
        nonce=b"n" * 32,
    )


# ---------------------------------------------------------------- peers


@pytest.mark.parametrize(("answer", "error"), [(UNKNOWN, NotFound), (SILENT, Unreachable)])
async def test_peer_takes_up_no_move_that_its_source_does_not_confirm(
    node: Any, other: Other, answer: SnapshotError, error: type[SnapshotError]
) -> None:
    other.outcome = answer
    steps = PeerSteps(node)
    with pytest.raises(error, match="node-9"):
        await steps.suspend_timeouts(pb.RepointRequest(description=description()))
    with pytest.raises(error, match="node-9"):
        await steps.repoint(pb.RepointRequest(description=description()))
    assert steps.journal.all() == []


async def test_peer_forgets_an_announced_move_that_its_source_does_not_know(node: Any, other: Other) -> None:
    """As a daemon of an earlier version journalled it, without asking."""
    other.outcome = pb.Outcome(kind=pb.UNDECIDED)
    steps = PeerSteps(node)
    await steps.suspend_timeouts(pb.RepointRequest(description=description()))
    moving = steps.moving(MOVE)
    assert steps.moving(MOVE).log.last_mark is Mark.TIMEOUTS_SUSPENDED
    await steps._settle_once(moving)
    assert outcome(moving) is None
    other.outcome = UNKNOWN
    await steps._settle_once(moving)
    assert moving.log.last_mark is Mark.SETTLED
    assert (found := outcome(moving)) is not None
    assert "does not know this move" in found.reason


# ---------------------------------------------------------------- targets


@pytest.fixture
def target(node: Any, monkeypatch: pytest.MonkeyPatch) -> TargetSteps:
    async def sweep(node: Any, move_log: Any) -> None:
        pass

    monkeypatch.setattr(Restore, "sweep", staticmethod(sweep))
    forwarding: Any = SimpleNamespace(hold_again=lambda uid: None)
    return TargetSteps(node, SimpleNamespace(), forwarding)  # type: ignore[arg-type]


def prepared(target: TargetSteps, mark: Mark = Mark.PREPARED) -> Moving:
    begin = Begin(
        move=MOVE,
        role="target",
        rank_uid="job-0-01234567",
        job="job",
        rank=0,
        source_node="node-9",
        source_endpoint="10.0.0.9:1",
        target_node="spare-1",
        target_endpoint="10.0.0.3:1",
        nonce="00" * 32,
        boot_id=host.boot_id(),
        begun_unix_s=1.0,
    )
    move_log = target.journal.begin(begin)
    move_log.mark(mark)
    moving = target.moves[MOVE] = Moving(move_log)
    return moving


async def test_target_prepares_nothing_for_a_source_that_does_not_answer(target: TargetSteps, other: Other) -> None:
    other.outcome = SILENT
    facts = pb.RankFacts(source_node="node-9", rank=pb.Rank(uid="job-0-01234567"))
    facts.identity.CopyFrom(pb.Identity(user_id=1500, group_id=1500))
    with pytest.raises(Unreachable, match=r"node-9.*10\.0\.0\.9:1"):
        await target.prepare(pb.PrepareRequest(move=MOVE, facts=facts, source_endpoint="10.0.0.9:1"))
    assert target.journal.all() == []


async def test_prepared_move_of_a_silent_source_expires(
    target: TargetSteps, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.outcome = SILENT
    moving = prepared(target)
    await target.settle_once(moving)
    assert outcome(moving) is None
    monkeypatch.setattr(settling, "NEVER_BEGAN_S", 0.0)
    await target.settle_once(moving)
    assert moving.log.last_mark is Mark.DISCARDED
    assert (found := outcome(moving)) is not None
    assert (found.outcome, found.decided_by) == (Outcome.ABORT, "target")


@pytest.mark.parametrize("mark", [Mark.SEALED, Mark.RESTORING, Mark.HELD])
async def test_image_of_a_silent_source_never_expires(
    target: TargetSteps, other: Other, monkeypatch: pytest.MonkeyPatch, mark: Mark
) -> None:
    other.outcome = SILENT
    monkeypatch.setattr(settling, "NEVER_BEGAN_S", 0.0)
    moving = prepared(target, mark)
    await target.settle_once(moving)
    assert outcome(moving) is None


async def test_operator_ends_a_prepared_move_without_a_token(target: TargetSteps, other: Other) -> None:
    moving = prepared(target)
    other.outcome = SILENT
    with pytest.raises(Denied):
        await target.discard(MOVE, b"")  # a node
    await target.discard(MOVE, b"", "operator alice")
    assert moving.log.last_mark is Mark.DISCARDED
    assert (found := outcome(moving)) is not None
    assert found.decided_by == "operator alice"
    await target.discard(MOVE, b"", "operator alice")  # repeated


async def test_operator_cannot_end_a_move_that_its_source_knows(target: TargetSteps, other: Other) -> None:
    prepared(target)
    other.outcome = pb.Outcome(kind=pb.UNDECIDED)
    with pytest.raises(WrongState, match="knows"):
        await target.discard(MOVE, b"", "operator alice")


async def test_operator_cannot_drop_a_held_copy_without_a_token(target: TargetSteps, other: Other) -> None:
    moving = prepared(target, Mark.HELD)
    other.outcome = SILENT
    with pytest.raises(WrongState, match="may have a whole copy"):
        await target.discard(MOVE, b"", "operator alice")
    assert outcome(moving) is None


@pytest.mark.parametrize("others", [False, True])
async def test_keeper_that_waited_for_a_discarded_move_ends_unless_another_move_needs_it(
    target: TargetSteps, other: Other, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Also a move that is refused after its preparation ends like this."""
    renewed = asyncio.Event()

    async def start_spares() -> None:
        renewed.set()

    monkeypatch.setattr(spare_children, "_LATER_S", 0.0)
    monkeypatch.setattr(spare_children, "start_spares", start_spares)
    waiting_keepers.prepare(sys.executable)  # in place of criu, which gets no orders here
    (keeper,) = waiting_keepers._waiting
    moving = prepared(target)
    if others:
        target.moves["m-000000000001"] = Moving(moving.log)
    other.outcome = SILENT
    try:
        await target.discard(MOVE, b"", "operator alice")
        await asyncio.wait_for(renewed.wait(), 60)
        assert (keeper.process.poll() is None) is others
    finally:
        waiting_keepers.close()


@pytest.mark.parametrize("ended_by", ["silence", "operator", "source"])
async def test_source_is_declared_dead_after_the_target_has_dropped_the_move(
    target: TargetSteps, other: Other, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """Gates ask the target whether communicators are abandoned. The declaration is all that can open them, also when the
    target needs it no more, and it is kept over a restart."""
    moving = prepared(target)
    other.outcome = SILENT
    match ended_by:
        case "silence":
            monkeypatch.setattr(settling, "NEVER_BEGAN_S", 0.0)
            await target.settle_once(moving)
        case "operator":
            await target.discard(MOVE, b"", "operator alice")
        case "source":
            other.outcome = pb.Outcome(kind=pb.ABORT, reason="a test")
            await target.settle_once(moving)
            other.outcome = SILENT
    assert moving.log.last_mark is Mark.DISCARDED
    before = outcome(moving)
    moving.log.fold()
    del target.moves[MOVE]
    assert not (await target.copy_state(MOVE, "node-1")).abandoned
    for _ in range(2):  # repeated
        assert not (await target.declare_source_dead(MOVE, "operator alice")).running
    answer = await target.copy_state(MOVE, "node-1")
    assert (answer.state, answer.abandoned) == (pb.Copy.DISCARDED, True)
    assert before is not None
    assert (found := target.journal.get(MOVE).outcome) is not None
    assert (found.outcome, found.decided_by) == (Outcome.ABORT, before.decided_by)
    assert Journal(target.journal.folder.parent).get(MOVE).known.abandoned
