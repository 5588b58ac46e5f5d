"""When a job may be rolled back, and what a coordinator refuses after it was: there is never a second incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Undone, Unreachable, Usage, WrongState
from snapshotd.moves.job_rules import FENCED_S
from snapshotd.moves.jobs import records, rollback
from snapshotd.moves.rules import Mark
from snapshotd.proc import host
from tests.moves.test_coordinator import FIRST, RECORD, SECOND, Daemon, part

THIRD = "m-0000000000cc"


class Protected(Daemon):
    """A coordinator with a job of two ranks, whose nodes answer what the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.ranks: dict[str, list[pb.Rank]] = {}  # by node
        self.silent: set[str] = set()
        self.off: set[str] = set()  # endpoints of machines that do not answer
        monkeypatch.setattr(rollback, "answers", self._there)

    async def _there(self, endpoint: str, *, if_unknown: bool) -> bool:
        return endpoint not in self.off

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def ranks(request: pb.ListRanksRequest, timeout_s: float) -> pb.ListRanksReply:
            if name in self.silent:
                raise Unreachable("no answer")
            return pb.ListRanksReply(ranks=self.ranks.get(name, []))

        async def lease(request: pb.LeaseRequest, timeout_s: float) -> pb.LeaseReply:
            await asyncio.sleep(0)
            if name in self.silent:
                raise Unreachable("no answer")
            return pb.LeaseReply(reason="it knows no coordinator of this snapshot")

        async with super()._client(name, endpoint) as client:
            client.node = type("Nodes", (), {"ListRanks": staticmethod(ranks)})
            client.job.Lease = lease
            if endpoint in self.off:
                client.job.EndRanks = _must_not_be_called
            yield client

    async def take(self, record: str, *, moves: int = 16, kept: bool = True, uids: str = "train") -> None:
        """A snapshot. `kept`: all nodes have carried it out."""
        await self.steps.begin(snapshot(record, moves, uids))
        await self.complete(record, kept=kept)

    async def complete(self, record: str, *, kept: bool = True) -> None:
        parts = self.journal.get(record).record.participants
        self.stored |= {part.move: pb.Outcome(stored=True) for part in parts}
        self.copies |= {part.copy: pb.Copy(state=pb.Copy.STORED) for part in parts}
        assert (await self.steps.commit(record)).kind == pb.COMMIT
        if kept:
            self.stored |= {part.move: pb.Outcome(kind=pb.COMMIT, settled=True) for part in parts}
            self.copies |= {part.copy: pb.Copy(state=pb.Copy.KEPT) for part in parts}
            await self.settle(record)
            assert self.journal.get(record).last_mark is Mark.SETTLED
            await self.let_go(record)

    async def let_go(self, record: str) -> None:
        """Waits until the settle loop has noticed that the record is settled."""
        async with asyncio.timeout(60):
            while (moving := self.steps.moves.get(record)) is not None:
                moving.wake()
                await asyncio.sleep(0.01)

    async def roll_back(self, snapshot: str, record: str = THIRD, lost: tuple[str, ...] = ()) -> None:
        nodes = [pb.NodeAddresses(name=name, endpoint=f"e-{name}") for name in ("node-1", "node-2")]
        request = pb.RollbackRequest(record=record, snapshot=snapshot, nodes=nodes, lost_nodes=lost)
        assert (await self.steps.rollback(request, "operator")).kind == pb.COMMIT


async def _must_not_be_called(request: object, timeout_s: float) -> None:
    raise AssertionError("a machine that does not answer was called")


def snapshot(record: str, moves: int, uids: str = "train") -> pb.BeginJobRequest:
    parts = [part(rank, moves + rank) for rank in (0, 1)]
    for one in parts:
        one.rank_uid = f"{uids}-{one.rank}"
        one.copy, one.copy_node, one.copy_endpoint = f"m-{moves + 8 + one.rank:012x}", f"node-{2 - one.rank}", "e"
    return pb.BeginJobRequest(record=record, job="train", user_id=7, participants=parts, lease_s=30, snapshot=True)


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Protected]:
    made = Protected(tmp_path, monkeypatch)
    yield made
    await made.stop()


async def test_snapshot_that_is_not_kept_on_all_nodes_is_not_rolled_back_to(daemon: Protected) -> None:
    """A rank that does not know its coordinator yet would go on."""
    await daemon.take(FIRST, kept=False)
    daemon.stored["m-000000000010"] = pb.Outcome(kind=pb.COMMIT, settled=True)
    with pytest.raises(Busy, match="node-2 did not confirm"):
        await daemon.roll_back(FIRST)
    with pytest.raises(Busy, match="node-2 did not confirm"):
        await daemon.roll_back(FIRST, lost=("node-1",))
    await daemon.roll_back(FIRST, lost=("node-2",))


async def test_snapshot_counts_only_when_every_buddy_of_every_rank_has_its_copy(daemon: Protected) -> None:
    asked = snapshot(FIRST, 16)
    asked.participants[0].more_copies.add(move="m-0000000000f0", node="node-3", endpoint="e")
    asked.witnesses.append("node-4")
    await daemon.steps.begin(asked)
    assert daemon.journal.get(FIRST).record.quorums == [["node-1", "node-2", "node-3", "node-4"]]
    with pytest.raises(Undone, match="the copy of rank 0 on node-3"):
        await daemon.complete(FIRST, kept=False)
    daemon.copies["m-0000000000f0"] = pb.Copy(state=pb.Copy.STORED)
    await daemon.complete(FIRST, kept=False)
    assert daemon.journal.get(FIRST).committed


async def test_snapshot_begins_without_a_witness_that_cannot_be_asked(daemon: Protected) -> None:
    asked = snapshot(FIRST, 16)
    asked.witnesses.append("node-4")
    daemon.silent = {"node-4"}
    assert list((await daemon.steps.begin(asked)).not_asked) == ["node-4 (no answer)"]
    assert daemon.journal.get(FIRST).record.quorums == [["node-1", "node-2"]]


async def test_snapshot_that_is_begun_twice_at_once_has_one_list_of_voters(daemon: Protected) -> None:
    """Both find no record at first, and ask their witnesses, of which one answers later than the other."""
    asked = [snapshot(FIRST, 16), snapshot(FIRST, 16)]
    for one, witness in zip(asked, ("node-4", "node-5"), strict=True):
        one.witnesses.append(witness)
    first, second = await asyncio.gather(*(daemon.steps.begin(one) for one in asked), return_exceptions=True)
    assert isinstance(first, pb.BeginJobReply)
    assert isinstance(second, Busy)
    assert daemon.journal.get(FIRST).record.quorums == [["node-1", "node-2", "node-4"]]


@pytest.mark.parametrize("node", ["node-1", "node-2"])
async def test_two_places_of_one_image_are_on_different_nodes(daemon: Protected, node: str) -> None:
    asked = snapshot(FIRST, 16)
    asked.participants[0].more_copies.add(move="m-0000000000f0", node=node, endpoint="e")
    with pytest.raises(Usage, match="each on a node of its own"):
        await daemon.steps.begin(asked)


async def test_number_of_copies_that_was_asked_for_is_listed_with_the_snapshot(daemon: Protected) -> None:
    asked = snapshot(FIRST, 16)
    asked.copies = 1
    await daemon.steps.begin(asked)
    await daemon.complete(FIRST)
    assert [one.copies for one in (await daemon.steps.listed()).jobs] == [1]


async def test_snapshot_that_was_just_kept_is_rolled_back_to_at_once(daemon: Protected) -> None:
    await daemon.take(FIRST, kept=False)
    daemon.stored |= {f"m-{16 + rank:012x}": pb.Outcome(kind=pb.COMMIT, settled=True) for rank in (0, 1)}
    await daemon.roll_back(FIRST)


async def test_snapshot_that_is_not_kept_on_all_nodes_is_used_if_one_before_it_was(daemon: Protected) -> None:
    """Its ranks are bound to the coordinator already."""
    await daemon.take(FIRST)
    await daemon.take(SECOND, moves=32, kept=False)
    await daemon.roll_back(SECOND)


async def test_suspended_job_is_not_rolled_back(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.steps.begin(
        pb.BeginJobRequest(record=RECORD, job="t", user_id=7, participants=[part(0, 64), part(1, 65)], lease_s=30)
    )
    daemon.stored |= {f"m-{64 + rank:012x}": pb.Outcome(stored=True) for rank in (0, 1)}
    await daemon.steps.commit(RECORD)
    daemon.stored |= {f"m-{64 + rank:012x}": pb.Outcome(kind=pb.COMMIT, settled=True) for rank in (0, 1)}
    await daemon.settle(RECORD)
    await daemon.let_go(RECORD)
    with pytest.raises(WrongState, match="is suspended"):
        await daemon.roll_back(FIRST)


async def test_image_of_a_suspension_with_another_coordinator_forbids_a_rollback(daemon: Protected) -> None:
    await daemon.take(FIRST)
    daemon.ranks["node-2"] = [pb.Rank(uid="train-1", rank=1, place=pb.Rank.SUSPENDED)]
    with pytest.raises(WrongState, match="node-2 has the image of rank 1"):
        await daemon.roll_back(FIRST)
    assert daemon.journal.find(THIRD) is None


async def test_nothing_of_an_incarnation_that_is_over_is_stored(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.steps.begin(snapshot(SECOND, 32))
    await daemon.roll_back(FIRST)
    assert (await daemon.steps.commit(SECOND)).kind == pb.ABORT
    with pytest.raises(WrongState, match="rolled back already"):
        await daemon.steps.begin(snapshot("m-0000000000dd", 48))
    with pytest.raises(WrongState, match="rolled back already"):
        await daemon.steps.begin(
            pb.BeginJobRequest(record=RECORD, job="t", user_id=7, participants=[part(0, 64)], lease_s=30)
        )
    assert [one.move for one in records.current(daemon.journal)] == [FIRST]


async def test_snapshot_does_not_commit_if_the_job_was_rolled_back_while_ranks_were_asked(
    daemon: Protected, monkeypatch: pytest.MonkeyPatch
) -> None:
    await daemon.take(FIRST)
    await daemon.steps.begin(snapshot(SECOND, 32))

    async def no_end(_current: Any) -> None:
        """As if the snapshot had begun in the same moment."""

    monkeypatch.setattr(daemon.steps.rollbacks, "_end_snapshots", no_end)
    await daemon.roll_back(FIRST)
    with pytest.raises(Undone, match="rolled back meanwhile"):
        await daemon.complete(SECOND)


async def test_another_job_with_the_same_name_does_not_replace_a_snapshot(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.take(SECOND, moves=32, uids="next")
    assert [one.move for one in records.current(daemon.journal)] == [FIRST, SECOND]
    await daemon.roll_back(FIRST)
    assert records.rolled_back(daemon.journal, {"next-0"}) is None
    await daemon.take("m-0000000000ee", moves=48, uids="next")
    assert [one.move for one in records.current(daemon.journal)] == [FIRST, "m-0000000000ee"]


async def test_older_snapshot_is_not_rolled_back_to(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.steps.begin(snapshot(SECOND, 32))
    await daemon.complete(SECOND, kept=False)
    with pytest.raises(WrongState, match="newer snapshot"):
        await daemon.roll_back(FIRST)


async def test_rollback_is_remembered_as_long_as_its_job_has_a_snapshot(daemon: Protected) -> None:
    """A node that was cut off may come back late, and asks whether its ranks may run."""
    await daemon.take(FIRST)
    await daemon.roll_back(FIRST)
    await daemon.settle(THIRD)
    parts = [part(0, 80, 16), part(1, 81, 17)]
    begin = pb.BeginJobRequest(record=RECORD, job="t", user_id=7, suspension=THIRD, participants=parts, lease_s=30)
    await daemon.steps.begin(begin)
    daemon.copies |= {f"m-{80 + rank:012x}": pb.Copy(state=pb.Copy.HELD) for rank in (0, 1)}
    await daemon.steps.commit(RECORD)
    rollback = daemon.journal.get(THIRD)
    assert records.is_needed(daemon.journal, rollback)
    daemon.journal.get(FIRST).mark(Mark.SETTLED, dropped="the job has ended")
    assert not records.is_needed(daemon.journal, rollback)


async def test_node_counts_as_cut_off_so_long_after_its_machine_was_silent(
    daemon: Protected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that does not answer is not called: the call would take all of its time limit."""
    now_s = [1000.0]
    monkeypatch.setattr(host, "boottime_s", lambda: now_s[0])
    await daemon.take(FIRST)
    daemon.off = {"e-node-2"}
    await daemon.roll_back(FIRST)
    await daemon.settle(THIRD)
    now_s[0] += FENCED_S - 0.1
    await daemon.settle(THIRD)
    assert daemon.journal.get(THIRD).last_mark is not Mark.SETTLED
    now_s[0] += 0.1
    await daemon.settle(THIRD)
    assert daemon.journal.get(THIRD).last_mark is Mark.SETTLED


async def test_no_single_attempt_to_reach_a_node_says_that_it_is_cut_off(
    daemon: Protected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it took: this daemon may have stood still meanwhile, and its kernel has answered the node."""
    now_s, attempts = [1000.0], list[str]()
    monkeypatch.setattr(host, "boottime_s", lambda: now_s[0])

    async def stands_still(endpoint: str, *, if_unknown: bool) -> bool:
        attempts.append(endpoint)
        now_s[0] += 2 * FENCED_S
        return False

    await daemon.take(FIRST)
    monkeypatch.setattr(rollback, "answers", stands_still)
    await daemon.roll_back(FIRST)
    for _ in range(2):  # the coordinator may have settled it once by itself
        await daemon.settle(THIRD)
    assert daemon.journal.get(THIRD).last_mark is Mark.SETTLED
    assert attempts == ["e-node-2"] * 3, "twice in a row at last"


async def test_job_that_was_rolled_back_can_be_given_up(daemon: Protected) -> None:
    await daemon.take(FIRST)
    await daemon.roll_back(FIRST)
    await daemon.settle(THIRD)
    reply = await daemon.steps.drop(THIRD, "given up")
    assert list(reply.waiting_for) == []
    assert set(daemon.dropped) == {f"m-{number:012x}" for number in (16, 17, 24, 25)}
    assert daemon.given_up == set(daemon.dropped), "the launchers are told"
    assert records.current(daemon.journal) == []
    assert records.rolled_back(daemon.journal, {"train-0"}) is None
    assert daemon.journal.get(THIRD).last_mark is Mark.SETTLED
    parts = [part(0, 80, 16), part(1, 81, 17)]
    begin = pb.BeginJobRequest(record=RECORD, job="t", user_id=7, suspension=THIRD, participants=parts, lease_s=30)
    with pytest.raises(WrongState, match="has ended"):
        await daemon.steps.begin(begin)


async def test_snapshot_of_a_job_that_has_ended_can_be_dropped_without_a_node_that_is_lost(daemon: Protected) -> None:
    begin = snapshot(FIRST, 16)
    begin.nodes.extend(pb.NodeAddresses(name=name, endpoint="e") for name in ("node-1", "node-2"))
    await daemon.steps.begin(begin)
    await daemon.complete(FIRST)
    daemon.silent.add("node-2")
    with pytest.raises(WrongState, match="node-2 does not say"):
        await daemon.steps.drop(FIRST, "given up")
    daemon.ranks["node-1"] = [pb.Rank(uid="train-0", rank=0)]
    with pytest.raises(WrongState, match="node-1 knows rank 0"):
        await daemon.steps.drop(FIRST, "given up", ["node-2"])
    daemon.ranks.clear()
    await daemon.steps.drop(FIRST, "given up", ["node-2"])
    assert records.current(daemon.journal) == []
