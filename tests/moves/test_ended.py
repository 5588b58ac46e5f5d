"""A move that has ended leaves a summary in memory, and is asked about as before."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ClusterNode, PeerSocket
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.steps import Steps, settle_loop
from snapshotd.proc import host
from snapshotd.proc.tree import Process

MOVE, NONCE = "m-0123456789ab", "ab" * 32
MOVES = 60
#: With its task, its lock and its whole record, a move had about 7,000 in this test.
BYTES_EACH = 2000


def begun(journal: Journal, move: str = MOVE, role: str = "source") -> MoveLog:
    """A source with what a move of a small job journals."""
    nodes = ("node-1", "10.0.0.1:7070", "node-2", "10.0.0.2:7070")
    log = journal.begin(Begin(move, role, "job-0-1f", "job", 0, *nodes, NONCE, host.boot_id(), 1.0, 30.0, 1000))
    pairs = (("10.0.0.1:29500", "10.0.0.2:40000"),) * 3
    me = Process.of(os.getpid())
    log.mark(
        Mark.BEGUN if role == "source" else Mark.PREPARED,
        pid=me.pid,
        start_ticks=me.start_ticks,
        cgroup="/sys/fs/cgroup/snapshotd/ranks/job-0-1f",
        nodes=[ClusterNode(f"node-{number}", f"10.0.0.{number}:7070", [f"10.0.0.{number}/24"]) for number in range(3)],
        rewires=[pb.Rewire(kind=pb.Rewire.LISTENER, old_local=pb.Endpoint(ip="10.0.0.1", port=29500))],
        peer_sockets=[PeerSocket(number, [(4242, 777, 12)], *pairs) for number in range(2)],
    )
    return log


async def settle_once(moving: Moving) -> None:
    moving.log.decide(Outcome.ABORT, "the lease ran out", "source")
    moving.log.mark(Mark.SETTLED, sent_bytes=77, failure="its communicators could not be built again: no answer")


async def followed(steps: Steps, log: MoveLog) -> Moving:
    """The move, followed to its end."""
    moving = steps.moves[log.move] = steps.recall(log)
    moving.wake()  # the settle loop does not wait
    steps.follow(moving, settle_loop(moving, settle_once, 0.0, 0.0, "source"))
    assert moving.settling is not None
    await moving.settling
    return moving


async def test_moves_that_have_ended_take_little_memory(tmp_path: Path) -> None:
    steps = Steps(Journal(tmp_path))
    steps.role = "source"
    await followed(steps, begun(steps.journal, f"m-{MOVES:012x}"))  # what is made once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(MOVES):
            await followed(steps, begun(steps.journal, f"m-{number:012x}"))
        after, _ = tracemalloc.get_traced_memory()
        again = Journal(tmp_path)
        restarted, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert steps.moves == {}
    assert (after - before) / MOVES < BYTES_EACH
    assert len(again.all()) == MOVES + 1
    assert (restarted - after) / MOVES < BYTES_EACH


def test_whole_record_of_a_move_that_has_ended_is_on_disk(tmp_path: Path) -> None:
    log = begun(Journal(tmp_path))
    log.mark(Mark.SETTLED, pause_s=1.5)
    before, summary = log.record, (log.last_mark, log.ended_unix_s, log.copy_exists())
    log.fold()
    assert log.known != before
    assert (log.record, log.whole()) == (before, before)
    assert (log.last_mark, log.ended_unix_s, log.copy_exists()) == summary
    log.mark(Mark.SETTLED, pause_s=2.5, attached=True)  # the driver's word may come late
    assert (log.known.pause_s, log.record.attached) == (2.5, True)
    (read,) = Journal(tmp_path).all()
    assert (read.known, read.begin, read.record) == (log.known, log.begin, log.record)


def source_in(folder: Path) -> SourceSteps:
    node: Any = SimpleNamespace(journal=Journal(folder))
    anything: Any = SimpleNamespace()
    return SourceSteps(node, lambda pids: "", anything)


async def answers(source: SourceSteps) -> list[object]:
    """To every call about a move that a driver, a target or a peer may repeat."""
    receipt = rules.proof(bytes.fromhex(NONCE), "HELD", MOVE)
    found: list[object] = []
    for call in (
        source.begin(pb.BeginRequest(move=MOVE)),
        source.freeze(MOVE),
        source.attach(MOVE),
        source.commit(MOVE, receipt),
        source.abort(MOVE, "again", "driver"),
        source.release(MOVE, 0.0, pb.Timing()),
        source.renew(MOVE),
        source.outcome(MOVE),
    ):
        try:
            found.append(await call)
        except SnapshotError as error:
            found.append((error.code, error.message, error.where))
    return found


async def test_repeated_calls_have_the_same_answers_after_the_end(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    log = begun(source.journal)
    moving = source.moves[MOVE] = source.recall(log)
    moving.renew()
    await settle_once(moving)
    moving.failure = log.record.failure
    before = await answers(source)
    moving.wake()
    source.follow(moving, settle_loop(moving, settle_once, 0.0, 0.0, "source"))
    assert moving.settling is not None
    await moving.settling
    del moving
    assert source.moves == {}
    assert await answers(source) == before
    assert await answers(source_in(tmp_path)) == before
    outcome = before[-1]
    assert isinstance(outcome, pb.Outcome)
    assert (outcome.kind, outcome.settled) == (pb.ABORT, True)
    assert outcome.reason == "the lease ran out; its communicators could not be built again: no answer"
    assert pb.ReleaseReply(released=True, waiting_for="settled", bytes=77) in before


async def test_calls_about_an_ended_move_at_the_same_time_share_a_lock(tmp_path: Path) -> None:
    steps = Steps(Journal(tmp_path))
    steps.role = "source"
    await followed(steps, begun(steps.journal))
    first = steps.moving(MOVE)
    async with first.lock:
        second = steps.moving(MOVE)
        assert second.lock.locked()
        waiting = asyncio.create_task(second.lock.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    second.lock.release()
    with pytest.raises(NotFound):
        steps.moving("m-ba9876543210")
