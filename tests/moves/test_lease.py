"""A coordinator that most nodes do not follow any more ends its ranks, and only then another node gets their promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, NotFound, Unreachable, WrongState
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.job_rules import CUT_OFF_S, FENCED_S
from snapshotd.moves.jobs import lease, promises, records, succession
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.promises import Promises
from snapshotd.moves.jobs.succession import Succession
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ClusterNode, JobPart
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc import host

FIRST, SECOND, ROLLBACK, RESUMPTION = (f"m-{number:012x}" for number in (1, 2, 3, 4))
UIDS = ["train-0", "train-1", "train-2"]


class Member:
    """One node: its daemon's records, promises and leases, and one rank of the job."""

    def __init__(self, nodes: Nodes, name: str, folder: Path) -> None:
        self.nodes, self.name, self.folder = nodes, name, folder
        self.ended: list[str] = []
        self.start()
        rank = int(name[-1]) - 1
        self.entry = RankEntry(UIDS[rank], "train", rank, "guest", 1, 1, "", name, name, "key", host.boot_id(), 7)
        self.entry.coordinator_node, self.entry.tethered = "node-1", True
        self.ranks.put(self.entry)

    def start(self) -> None:
        """Starts the daemon, also again."""
        self.journal, self.ranks = Journal(self.folder), Ranks(self.folder)
        config = SimpleNamespace(node=self.name, advertise=self.name)
        node: Any = SimpleNamespace(config=config, journal=self.journal, ranks=self.ranks, client=self._client)
        nothing: Any = SimpleNamespace(moves={})
        self.steps = JobSteps(node, nothing)
        self.steps.promises.recall()
        self.steps.leases.recall()
        endings: Any = SimpleNamespace(ended_ones=list, cut_off=self._cut_off)
        self.succession = Succession(node, self.steps, nothing, nothing, nothing, endings)

    async def _cut_off(self, entries: list[RankEntry], why: str) -> None:
        self.ended += [entry.uid for entry in entries]

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(job=SimpleNamespace(Lease=self._lease(name), GetOutcome=self._outcome(name)))

    def _lease(self, name: str) -> Any:
        async def ask(request: pb.LeaseRequest, timeout_s: float) -> pb.LeaseReply:
            self._must_be_there(name)
            return await self.nodes[name].steps.promises.ask(request, self.name)

        return ask

    def _outcome(self, name: str) -> Any:
        async def ask(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            self._must_be_there(name)
            return await self.nodes[name].steps.outcome(request.move)

        return ask

    def _must_be_there(self, name: str) -> None:
        if {name, self.name} & {*self.nodes.cut, *self.nodes.down}:
            raise Unreachable("no answer")

    def take(self, record: str, *voters: str) -> None:
        """A complete snapshot that this node coordinates."""
        here = (self.name, self.name)
        begin = Begin(record, "job", "", "train", 0, *here, *here, "00" * 32, host.boot_id(), float(record[-1]))
        move_log = self.journal.begin(Begin(**{**_fields(begin), "kind": "snapshot"}))
        parts = [JobPart(uid, rank, "m-0000000000aa", "", "", "", "", "") for rank, uid in enumerate(UIDS)]
        nodes = [ClusterNode(name, name, []) for name in self.nodes.members]
        move_log.mark(Mark.BEGUN, participants=parts, nodes=nodes, quorums=[sorted({self.name, *voters})])
        move_log.decide(Outcome.COMMIT, "complete", "test")
        move_log.mark(Mark.SETTLED)
        self.steps.leases.begins(record)

    async def adopt(self, record: str, former: str, *lost: str) -> None:
        parts = [pb.Participant(rank_uid=uid, rank=rank, move="m-0000000000aa") for rank, uid in enumerate(UIDS)]
        request = pb.AdoptRequest(record=record, job="train", participants=parts, former=former, former_endpoint=former)
        request.nodes.extend(pb.NodeAddresses(name=name, endpoint=name) for name in self.nodes.members)
        request.lost_nodes.extend(lost)
        await self.succession.adopt(request, "test")

    def coordinates(self) -> bool:
        return bool(records.current(self.journal)) and not self.steps.leases.lost(UIDS)


def _fields(begin: Begin) -> dict[str, Any]:
    return {name: getattr(begin, name) for name in begin.__struct_fields__}


class Nodes:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(host, "boottime_s", lambda: self.now_s)
        self.cut: set[str] = set()
        self.down: set[str] = set()  # the machine is there, and its daemon is not
        for module in (promises, succession):
            monkeypatch.setattr(module, "answers", self._there)
        monkeypatch.setattr(lease, "refuses", self._refuses)
        self.members: dict[str, Member] = {}
        for name in ("node-1", "node-2", "node-3"):
            (folder / name).mkdir()
            self.members[name] = Member(self, name, folder / name)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    async def _there(self, endpoint: str, *, if_unknown: bool) -> bool:
        return endpoint not in self.cut

    async def _refuses(self, endpoint: str, _limit_s: float) -> bool:
        return endpoint in self.down and endpoint not in self.cut

    async def after(self, seconds: float, every_s: float = 1.0) -> None:
        """Time passes, and all daemons look at their leases."""
        for _ in range(max(1, round(seconds / every_s))):
            self.now_s += every_s if seconds else 0
            for member in self.members.values():
                if member.name not in self.down:
                    await member.succession.look()


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A job of three ranks, whose snapshot node-1 coordinates."""
    made = Nodes(tmp_path, monkeypatch)
    made["node-1"].take(FIRST, "node-2", "node-3")
    await made.after(10)
    return made


async def test_coordinator_that_is_cut_off_ends_its_ranks_and_decides_nothing(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    await nodes.after(CUT_OFF_S - 2)
    one = nodes["node-1"]
    assert (one.ended, one.coordinates()) == ([], True)
    await nodes.after(3)
    assert one.ended[:1] == ["train-0"]
    assert not one.coordinates()
    assert "cut off from most nodes" in (await one.steps.may_run(pb.MayRunRequest(rank_uids=UIDS))).ended_by
    with pytest.raises(WrongState, match="cut off from most nodes"):
        await one.steps.rollback(pb.RollbackRequest(record=ROLLBACK, snapshot=FIRST), "test")
    nodes.cut = set()
    await nodes.after(1)
    assert one.coordinates(), "it has asked, and no other node took over"


async def test_snapshot_is_settled_when_most_nodes_that_keep_it_know_that_all_have_confirmed_it(nodes: Nodes) -> None:
    """Then another node may take over, whichever is lost."""
    one = nodes["node-1"]
    assert (await one.steps.outcome(FIRST)).settled
    nodes.cut = {"node-2", "node-3"}
    one.take(SECOND, "node-2", "node-3")
    await nodes.after(1)
    assert not (await one.steps.outcome(SECOND)).settled
    nodes.cut = {"node-3"}
    await nodes.after(1)
    assert (await one.steps.outcome(SECOND)).settled
    one.start()
    assert not (await one.steps.outcome(SECOND)).settled, "a restarted daemon asks again"
    await nodes.after(1)
    assert (await one.steps.outcome(SECOND)).settled


async def test_coordinator_that_was_down_for_long_asks_before_it_ends_ranks(nodes: Nodes) -> None:
    one, request = nodes["node-1"], pb.MayRunRequest(rank_uids=UIDS)
    nodes.down = {"node-1"}
    await nodes.after(CUT_OFF_S + 5)
    nodes.down = set()
    one.start()
    with pytest.raises(Busy, match="has just started"):
        await one.steps.may_run(request)
    await nodes.after(1)
    assert (await one.steps.may_run(request)).ended_by == ""
    assert one.ended == []


async def test_coordinator_that_is_cut_off_when_it_starts_ends_ranks_soon(nodes: Nodes) -> None:
    one, request = nodes["node-1"], pb.MayRunRequest(rank_uids=UIDS)
    nodes.down = {"node-1"}
    await nodes.after(CUT_OFF_S + 5)
    nodes.down, nodes.cut = set(), {"node-2", "node-3"}
    one.start()
    await nodes.after(lease.STARTS_S + 1)
    assert "cut off from most nodes" in (await one.steps.may_run(request)).ended_by
    assert one.ended[:1] == ["train-0"]


async def test_coordinator_that_has_lost_one_node_of_three_goes_on(nodes: Nodes) -> None:
    nodes.cut = {"node-3"}
    await nodes.after(3 * FENCED_S)
    assert nodes["node-1"].ended == []
    assert nodes["node-1"].coordinates()


async def test_successor_gets_the_promises_only_when_the_former_one_has_ended_its_ranks(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    for _ in range(int(FENCED_S) - 2):
        await nodes.after(1)
        with pytest.raises(WrongState, match="heard"):
            await nodes["node-2"].adopt(FIRST, "node-1")
    assert nodes["node-1"].ended
    await nodes.after(3)
    await nodes["node-2"].adopt(FIRST, "node-1")
    assert not nodes["node-1"].coordinates()
    assert nodes["node-2"].coordinates()
    whole = nodes["node-2"].journal.get(FIRST).whole()
    assert (whole.fenced, whole.quorums) == ("node-1", [["node-1", "node-2", "node-3"]])


async def test_former_coordinator_that_comes_back_learns_of_its_successor(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    await nodes.after(FENCED_S + 1)
    await nodes["node-2"].adopt(FIRST, "node-1")
    nodes.cut = set()
    nodes["node-1"].start()  # it has booted
    await nodes.after(2)
    former, successor = nodes["node-1"], nodes["node-2"]
    assert former.journal.get(FIRST).whole().handed_to == "node-2"
    assert not former.coordinates()
    assert successor.coordinates()
    assert successor.journal.get(FIRST).whole().handed_to == ""
    reply = await former.steps.may_run(pb.MayRunRequest(rank_uids=UIDS))
    assert (reply.successor, reply.ended_by) == ("node-2", "")
    await nodes.after(2)
    nodes.cut = {"node-3"}
    await nodes.after(2 * FENCED_S)
    assert successor.coordinates(), "the former one follows it"


async def test_second_successor_follows_the_first(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    await nodes.after(FENCED_S + 1)
    await nodes["node-2"].adopt(FIRST, "node-1")
    await nodes.after(2)
    nodes.cut = {"node-2"}
    await nodes.after(2)
    with pytest.raises(WrongState):
        await nodes["node-3"].adopt(FIRST, "node-2")
    await nodes.after(FENCED_S)
    await nodes["node-3"].adopt(FIRST, "node-2")
    nodes.cut = set()
    await nodes.after(3)
    assert [name for name, member in nodes.members.items() if member.coordinates()] == ["node-3"]


async def test_node_whose_daemon_was_restarted_waits_anew(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    await nodes.after(FENCED_S + 1)
    nodes["node-3"].start()
    with pytest.raises(WrongState, match="heard 0 s ago"):
        await nodes["node-2"].adopt(FIRST, "node-1")
    await nodes.after(FENCED_S)
    await nodes["node-2"].adopt(FIRST, "node-1")


async def test_daemons_that_are_down_do_not_end_a_job(nodes: Nodes) -> None:
    nodes.down = {"node-2", "node-3"}
    await nodes.after(3 * FENCED_S)
    assert nodes["node-1"].ended == []
    nodes.cut = {"node-2", "node-3"}
    await nodes.after(CUT_OFF_S + 2)
    assert nodes["node-1"].ended
    nodes.cut = set()  # their promises are too old: they may follow another coordinator since
    await nodes.after(2)
    assert not nodes["node-1"].coordinates()


async def test_coordinator_whose_daemon_is_down_is_not_replaced(nodes: Nodes) -> None:
    nodes.down = {"node-1"}
    await nodes.after(3 * FENCED_S)
    with pytest.raises(WrongState, match="is there"):
        await nodes["node-2"].adopt(FIRST, "node-1")


async def test_daemon_that_is_restarted_while_it_is_cut_off_knows_how_old_its_lease_is(nodes: Nodes) -> None:
    nodes.cut = {"node-1"}
    await nodes.after(CUT_OFF_S - 5)
    nodes["node-1"].start()
    await nodes.after(6)
    assert nodes["node-1"].ended


async def test_two_nodes_have_no_majority(nodes: Nodes) -> None:
    for member in nodes.members.values():
        member.steps.promises = member.steps.leases.promises = Promises(member.steps.node)
    nodes["node-1"].journal.remove(FIRST)
    nodes["node-1"].take(SECOND, "node-2")
    await nodes.after(2)
    nodes.cut = {"node-1"}
    await nodes.after(2 * FENCED_S)
    assert nodes["node-1"].ended == [], "no other node takes over by itself"
    with pytest.raises(WrongState, match="an operator must decide") as refused:
        await nodes["node-2"].adopt(SECOND, "node-1")
    assert "--lost node-1" in refused.value.advice
    await nodes["node-2"].adopt(SECOND, "node-1", "node-1")
    nodes.cut = set()
    await nodes.after(2)
    assert nodes["node-1"].journal.get(SECOND).whole().handed_to == "node-2"


async def test_as_long_as_two_snapshots_are_kept_both_need_a_majority(nodes: Nodes) -> None:
    one = nodes["node-1"]
    one.take(SECOND, "node-2")  # of two nodes: it needs no lease
    await nodes.after(2)
    kept = nodes["node-2"].steps.promises.of(SECOND)
    assert kept is not None
    assert kept.quorums == [["node-1", "node-2", "node-3"], ["node-1", "node-2"]]
    nodes.cut = {"node-1"}
    await nodes.after(CUT_OFF_S + 1)
    assert not one.coordinates()
    nodes.cut = set()
    one.journal.get(FIRST).mark(Mark.SETTLED, dropped="replaced")
    await nodes.after(2)
    assert one.journal.get(FIRST).whole().let_go
    assert nodes["node-3"].steps.promises.of(FIRST) is None
    nodes.cut = {"node-1"}
    await nodes.after(3 * FENCED_S)
    assert one.coordinates()
    with pytest.raises(WrongState, match="no node knows"):
        await nodes["node-3"].adopt(FIRST, "node-1")


async def test_nodes_that_an_operator_declares_dead_are_not_needed(nodes: Nodes) -> None:
    one = nodes["node-1"]
    nodes.cut = {"node-2", "node-3"}
    await nodes.after(CUT_OFF_S + 1)
    assert not one.coordinates()
    await one.steps.leases.declare(one.journal.get(FIRST), ["node-2"])
    assert one.coordinates()


async def test_job_that_is_handed_over_is_followed_at_once(nodes: Nodes) -> None:
    await nodes["node-1"].succession.hand_over(FIRST, "node-3", "test")
    assert nodes["node-1"].entry.coordinator_node == "node-3"
    await nodes["node-3"].adopt(FIRST, "node-1")
    assert nodes["node-3"].coordinates()
    nodes.cut = {"node-1"}
    await nodes.after(2 * FENCED_S)
    assert nodes["node-1"].ended == [], "it does not coordinate the job: the tether ends its rank"


async def test_former_coordinator_lets_no_copy_run_that_waits_for_its_word(nodes: Nodes) -> None:
    """It had decided a rollback and committed the resumption, and a target has not heard of that before it was lost."""
    one, here = nodes["node-1"], ("node-1", "node-1")
    parts = one.journal.get(FIRST).whole().participants
    for record, kind in ((ROLLBACK, "rollback"), (RESUMPTION, "")):
        begin = Begin(record, "job", "", "train", 0, *here, *here, "00" * 32, host.boot_id(), 5.0)
        move_log = one.journal.begin(Begin(**{**_fields(begin), "kind": kind}))
        suspension = "" if kind else ROLLBACK
        move_log.mark(Mark.BEGUN, participants=parts, snapshot=FIRST if kind else "", suspension=suspension)
        move_log.decide(Outcome.COMMIT, "decided", "test")
    assert (await one.steps.outcome(RESUMPTION)).kind == pb.COMMIT
    nodes.cut = {"node-1"}
    await nodes.after(FENCED_S + 1)
    with pytest.raises(WrongState, match="cut off from most nodes"):
        await one.steps.outcome(RESUMPTION)
    await nodes["node-2"].adopt(FIRST, "node-1")
    nodes.cut = set()
    await nodes.after(2)
    assert (await one.steps.outcome(RESUMPTION)).kind == pb.ABORT
    assert records.rolled_back(one.journal, set(UIDS)) is None
    assert all(log.ended_unix_s for log in one.journal.all())


async def test_unknown_snapshot_is_promised_to_no_successor(nodes: Nodes) -> None:
    asked = pb.LeaseRequest(record=SECOND, job="train", rank_uids=UIDS, endpoint="node-2")
    assert (await nodes["node-3"].steps.promises.ask(asked, "node-2")).holder == ""
    with pytest.raises(NotFound):
        await nodes["node-3"].steps.outcome(SECOND)
