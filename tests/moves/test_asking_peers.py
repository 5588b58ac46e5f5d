"""A restarted source whose target knows no such move asks all other nodes before its copy continues."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Unreachable
from snapshotd.api.servicers import known_to_peer
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import CopyState, Mark, Outcome, SourceDecision
from snapshotd.moves.source.steps import SourceSteps

MOVE = "m-0123456789ab"
NODES = ("source", "target", "peer-1", "peer-2")
SILENT, OLD = Unreachable("down"), NotFound("no such move")


class Source(SourceSteps):
    """A source with a frozen copy, whose other nodes have the given answers."""

    def __init__(self, target: CopyState, **peers: Any) -> None:
        self.target, self.answers = target, {name.replace("_", "-"): answer for name, answer in peers.items()}
        self.asked: list[str] = []
        node: Any = SimpleNamespace(config=SimpleNamespace(node="source"), client=self._client)
        self.node = node

    async def ask_target(self, move_log: Any) -> CopyState:
        return self.target

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> Any:
        async def list_moves(request: pb.ListMovesRequest, timeout_s: float) -> pb.ListMovesReply:
            assert (request.move, request.as_peer) == (MOVE, True)
            self.asked.append(name)
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return pb.ListMovesReply(known_to_peer=answer)

        yield SimpleNamespace(node=SimpleNamespace(ListMoves=list_moves))

    async def decides(self, *, restarted: bool = True) -> SourceDecision:
        log = SimpleNamespace(
            move=MOVE,
            last_mark=Mark.STREAMED,
            outcome=None,
            committed=False,
            copy_exists=lambda: True,
            begin=SimpleNamespace(target_node="target"),
        )
        nodes = [pb.NodeAddresses(name=name, endpoint=f"{name}:7070") for name in NODES]
        moving: Any = SimpleNamespace(log=log, nodes=nodes, lease_expired=True, interrupted=False, restarted=restarted)
        return rules.source_next(await self._gather(moving))[0]


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        (pb.COMMIT, SourceDecision.WAIT_FOR_PERSON),
        (SILENT, SourceDecision.WAIT_FOR_PERSON),
        (pb.UNDECIDED, SourceDecision.RECORD_ABORT),
        (pb.ABORT, SourceDecision.RECORD_ABORT),
        (OLD, SourceDecision.RECORD_ABORT),
    ],
    ids=["ran there", "silent", "knows nothing", "aborted", "older version"],
)
async def test_copy_continues_only_if_every_other_node_denies_that_the_rank_ran_on_the_target(
    answer: Any, decision: SourceDecision
) -> None:
    source = Source(CopyState.NO_SUCH_MOVE, peer_1=pb.UNDECIDED, peer_2=answer)
    assert await source.decides() is decision
    assert sorted(source.asked) == ["peer-1", "peer-2"]


@pytest.mark.parametrize(
    ("target", "decision"),
    [
        (CopyState.HELD, SourceDecision.RECORD_ABORT),
        (CopyState.RUNNING, SourceDecision.RECORD_COMMIT),
        (CopyState.UNREACHABLE, SourceDecision.ASK_TARGET),
    ],
)
async def test_target_that_knows_the_move_decides_alone(target: CopyState, decision: SourceDecision) -> None:
    source = Source(target, peer_1=pb.COMMIT, peer_2=pb.COMMIT)
    assert await source.decides() is decision
    assert source.asked == []


async def test_source_that_was_never_away_asks_no_peer() -> None:
    source = Source(CopyState.NO_SUCH_MOVE, peer_1=pb.COMMIT, peer_2=pb.COMMIT)
    assert await source.decides(restarted=False) is SourceDecision.RECORD_ABORT
    assert source.asked == []


@pytest.mark.parametrize(
    ("peer", "gate", "known"),
    [
        (None, None, pb.UNDECIDED),
        (Outcome.COMMIT, None, pb.COMMIT),
        (Outcome.ABORT, Outcome.COMMIT, pb.COMMIT),
        (None, Outcome.ABORT, pb.ABORT),
    ],
)
def test_node_answers_what_it_knows_as_a_peer(tmp_path: Path, peer: Any, gate: Any, known: int) -> None:
    steps: Any = [SimpleNamespace(journal=Journal(tmp_path / name)) for name in ("peer", "gate")]
    assert known_to_peer(steps, MOVE) == pb.UNDECIDED, "it has no record of the move"
    for each, outcome in zip(steps, (peer, gate), strict=True):
        begin = Begin(MOVE, "peer", "a-0-00000001", "a", 0, "s", "s:1", "t", "t:1", "00" * 32, "boot", 1.0)
        move_log = each.journal.begin(begin)
        if outcome is not None:
            move_log.decide(outcome, "why", "source")
    assert known_to_peer(steps, MOVE) == known
