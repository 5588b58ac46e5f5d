"""The gates of a node, and their coordination by the source, with doubles for shims and nodes."""

from __future__ import annotations

import asyncio

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Denied, NcclFailed, RankGone, Refused, Usage, WrongState
from snapshotd.moves.nccl import communicators, on_nodes
from snapshotd.moves.rules import Mark
from tests.daemon.gate_doubles import ALICE, BOB, MOVE, PAIR, WORLD, Cluster, end

# ---------------------------------------------------------------- closing


async def test_gate_is_journalled_before_it_is_closed(cluster: Cluster) -> None:
    gates = cluster.nodes["b"].gates
    seen = []

    def look(what: str) -> None:
        found = gates.journal.find(MOVE)
        seen.append((what, found.last_mark if found else None, len(found.record.gate_processes) if found else 0))

    cluster.shims.before = look
    report = await gates.close(cluster.request)
    assert seen == [("close", Mark.GATED, 2), ("close", Mark.GATED, 2)]
    assert sorted(process.rank for process in report.processes) == [1, 2]
    assert len(cluster.shims.closed) == 2


async def test_gates_of_another_users_job_of_the_same_name_stay_open(cluster: Cluster) -> None:
    """Job names are not reserved: bob gives his job the name of alice's, which must neither wait for his nor stop for it."""
    gates = cluster.nodes["b"].gates
    cluster.nodes["b"].entries[1].user_id = BOB
    report = await gates.close(cluster.request)
    assert [process.rank_uid for process in report.processes] == ["job-1"]
    assert cluster.shims.closed == {cluster.process[1]}
    (closed,) = gates.closed()
    assert (closed.user_id, list(closed.ranks)) == (ALICE, [1])
    of_bob = pb.GateReportRequest(job="job", user_id=BOB)
    assert [process.rank_uid for process in (await gates.report(of_bob)).processes] == ["job-2"]
    bobs = cluster.request
    bobs.move, bobs.rank_uid, bobs.user_id = "m-00000000000b", "job-2", BOB
    await gates.close(bobs)  # not Busy
    assert cluster.shims.closed == {cluster.process[1], cluster.process[2]}


async def test_request_that_does_not_name_the_user_is_refused(cluster: Cluster) -> None:
    gates, request = cluster.nodes["b"].gates, cluster.request
    request.ClearField("user_id")
    with pytest.raises(Usage, match="does not say whose job"):
        await gates.close(request)
    with pytest.raises(Usage, match="does not say whose job"):
        await gates.report(pb.GateReportRequest(job="job"))
    assert gates.closed() == []


async def test_closed_gate_is_listed_until_it_opens(cluster: Cluster) -> None:
    gates = cluster.nodes["b"].gates
    assert gates.closed() == []
    await cluster.close_all()
    (closed,) = gates.closed()
    assert (closed.move, closed.job, list(closed.ranks)) == (MOVE, "job", [1, 2])
    assert closed.since_unix_s == gates.moves[MOVE].log.begin.begun_unix_s
    assert gates.closed("m-ffffffffffff") == []
    end(cluster.process[2])
    (closed,) = gates.closed(MOVE)
    assert list(closed.ranks) == [1]
    await gates.open(MOVE, cluster.token("COMMIT"), "driver")
    assert gates.closed() == []


async def test_repeated_close_closes_the_rest_and_journals_nothing_new(cluster: Cluster) -> None:
    gates = cluster.nodes["b"].gates
    cluster.shims.failing["close"] = 1
    with pytest.raises(NcclFailed):
        await gates.close(cluster.request)
    await gates.close(cluster.request)
    assert cluster.shims.closed == {cluster.process[1], cluster.process[2]}
    assert (gates.journal.get(MOVE).folder / "marks").read_text().count("\n") == 1


async def test_repeated_close_finds_processes_with_their_first_communicator(cluster: Cluster) -> None:
    """Rank 2 creates its first communicator after the first Close. Its gate must close too, and is journalled before."""
    gates, late = cluster.nodes["b"].gates, cluster.process[2]
    comms = cluster.shims.comms.pop(late)
    report = await gates.close(cluster.request)
    assert [process.rank for process in report.processes] == [1]
    cluster.shims.comms[late] = comms
    report = await gates.close(cluster.request)
    assert sorted(process.rank for process in report.processes) == [1, 2]
    assert cluster.shims.closed == {cluster.process[1], late}
    assert len(gates.journal.get(MOVE).record.gate_processes) == 2
    await gates.open(MOVE, cluster.token("COMMIT"), "operator")
    assert cluster.shims.closed == set()


async def test_job_without_communicators_leaves_no_trace(cluster: Cluster) -> None:
    gates = cluster.nodes["c"].gates
    assert not (await gates.close(cluster.request)).processes
    assert gates.journal.all() == []
    assert cluster.shims.said == []
    assert (await gates.open(MOVE, b"any", "operator")).opened


async def test_gates_of_a_job_are_closed_for_one_move_only(cluster: Cluster) -> None:
    gates = cluster.nodes["b"].gates
    await gates.close(cluster.request)
    other = cluster.request
    other.move = "m-ba9876543210"
    with pytest.raises(Busy):
        await gates.close(other)


async def test_targets_are_sent_to_the_named_process(cluster: Cluster) -> None:
    gates = cluster.nodes["b"].gates
    await gates.close(cluster.request)
    line = f"{WORLD} c -1 12"
    targets = pb.ProcessTargets(
        rank_uid="job-2", pid=cluster.pid(2), targets=[pb.ChannelCount(communicator=WORLD, peer=-1, count=12)]
    )
    await gates.set_targets(pb.SetTargetsRequest(move=MOVE, processes=[targets]))
    assert cluster.shims.of("targets") == [(cluster.pid(2), [line])]
    targets.pid = 1
    with pytest.raises(RankGone):
        await gates.set_targets(pb.SetTargetsRequest(move=MOVE, processes=[targets]))


# ---------------------------------------------------------------- opening


async def test_commit_opens_all_gates_except_that_of_the_frozen_copy(cluster: Cluster) -> None:
    await cluster.close_all()
    for name in "ab":
        assert (await cluster.nodes[name].gates.open(MOVE, cluster.token("COMMIT"), "operator")).opened
    assert sorted(cluster.shims.of("open")) == sorted([(cluster.pid(1), None), (cluster.pid(2), None)])
    with pytest.raises(WrongState):
        await cluster.nodes["b"].gates.close(cluster.request)


async def test_wrong_token_opens_no_gate(cluster: Cluster) -> None:
    await cluster.close_all()
    with pytest.raises(Denied):
        await cluster.nodes["b"].gates.open(MOVE, b"x" * 32, "operator")
    assert cluster.shims.of("open") == []


async def test_abort_from_the_driver_waits_for_the_source(cluster: Cluster) -> None:
    await cluster.close_all()
    gates = cluster.nodes["b"].gates
    cluster.answers.outcome = pb.Outcome(kind=pb.ABORT)
    reply = await gates.open(MOVE, cluster.token("ABORT"), "operator")
    assert not reply.opened
    assert "not built its communicators again" in reply.waiting_for
    assert cluster.shims.of("open") == []
    cluster.answers.outcome = pb.Outcome(kind=pb.ABORT, settled=True)
    assert (await gates.open(MOVE, cluster.token("ABORT"), "operator")).opened
    assert len(cluster.shims.of("open")) == 2


async def test_abort_from_the_source_opens_all_gates(cluster: Cluster) -> None:
    await cluster.close_all()
    for name in "ab":
        assert (await cluster.nodes[name].gates.open(MOVE, cluster.token("ABORT"), "a")).opened
    assert cluster.shims.closed == set()


async def test_process_that_ended_behind_its_gate_does_not_delay_the_others(cluster: Cluster) -> None:
    await cluster.close_all()
    end(cluster.process[1])
    assert (await cluster.nodes["b"].gates.open(MOVE, cluster.token("COMMIT"), "a")).opened
    assert cluster.shims.of("open") == [(cluster.pid(2), None)]


@pytest.mark.parametrize("outcome", ["abort", "commit", "unknown"])
async def test_restarted_daemon_asks_for_the_outcome_and_opens(cluster: Cluster, outcome: str) -> None:
    await cluster.close_all()
    cluster.stop()
    node = cluster.nodes["b"]
    node.start()
    match outcome:
        case "abort":
            cluster.answers.outcome = pb.Outcome(kind=pb.ABORT, settled=True)
        case "commit":
            cluster.answers.copy = pb.Copy(state=pb.Copy.RUNNING)
        case _:
            cluster.answers.unknown = True
    node.gates.adopt_journal()
    settling = node.gates.moves[MOVE].settling
    assert settling is not None
    await settling
    assert {pid for pid, _ in cluster.shims.of("open")} == {cluster.pid(1), cluster.pid(2)}
    node.start()
    node.gates.adopt_journal()
    assert node.gates.moves == {}


# ---------------------------------------------------------------- the source's coordination


async def test_members_are_journalled_before_anything_is_taken_down(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    noted = []
    cluster.shims.before = lambda what: noted.append(set(moving.log.record.communicators or {}))
    reply = await cluster.nodes["a"].communicators.detach(moving)
    assert reply.comms == 2
    assert noted == [{WORLD, PAIR}] * 3
    assert cluster.shims.states() == {"detached"}
    assert moving.log.last_mark is Mark.BEGUN


async def test_communicators_without_the_rank_are_not_taken_down(cluster: Cluster) -> None:
    cluster.shims.comms[cluster.process[2]]["c" * 16] = [1, 0, "live"]
    await cluster.close_all()
    await cluster.nodes["a"].communicators.detach(cluster.begin())
    assert cluster.shims.comms[cluster.process[2]]["c" * 16][2] == "live"


async def test_rank_without_communicators_is_not_changed(cluster: Cluster) -> None:
    del cluster.shims.comms[cluster.process[0]]
    moving = cluster.begin()
    assert (await cluster.nodes["a"].communicators.detach(moving)).comms == 0
    assert moving.log.record.communicators is None
    assert cluster.shims.said == []


async def test_detach_requires_closed_gates(cluster: Cluster) -> None:
    with pytest.raises(WrongState):
        await cluster.nodes["a"].communicators.detach(cluster.begin())


async def test_unreachable_member_prevents_the_detach(cluster: Cluster) -> None:
    await cluster.close_all()
    cluster.nodes["b"].reachable = False
    moving = cluster.begin()
    with pytest.raises(Refused, match="3 members, and only"):
        await cluster.nodes["a"].communicators.detach(moving)
    assert cluster.shims.of("detach") == []
    assert moving.log.record.communicators is None


async def test_all_members_build_in_one_order_with_ids_of_rank_0(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    await source.attach(moving, "a")
    world, pair = f"{cluster.pid(0):0256x}", f"{cluster.pid(1):0256x}"  # rank 1 has member 0 of the pair
    lines = [f"{WORLD} {world} try", f"{PAIR} {pair} try"]
    assert dict(cluster.shims.of("attach")) == {cluster.pid(rank): lines for rank in range(3)}
    assert cluster.shims.states() == {"live"}


async def test_only_the_source_may_change_communicators(cluster: Cluster) -> None:
    await cluster.close_all()
    members = cluster.nodes["b"].members
    with pytest.raises(Denied):
        await members.detach(pb.DetachRequest(move=MOVE, comms=[WORLD], rank_uids=["job-1"]), "c")
    with pytest.raises(Denied):
        await members.attach(pb.AttachRequest(move=MOVE, rank_uids=["job-1"]), "c")
    with pytest.raises(Denied):
        await members.new_id(pb.NewIdRequest(move=MOVE, rank_uid="job-1", pid=cluster.pid(1)), "c")
    with pytest.raises(Denied):
        await members.give_up(MOVE, "c")


@pytest.mark.parametrize("failing", range(3))
async def test_failed_member_makes_the_others_give_up(cluster: Cluster, failing: int) -> None:
    """On its own node (ranks 1 and 2 share one) and on all others. The cause is reported, and the next attempt succeeds."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    cluster.shims.waiting = {process for rank, process in cluster.process.items() if rank != failing}
    cluster.shims.failing_process = cluster.process[failing]
    with pytest.raises(NcclFailed, match=f"on {'abb'[failing]}: process {cluster.pid(failing)} cannot attach"):
        await source.attach(moving, "a")
    cluster.shims.waiting.clear()
    cluster.shims.failing_process = None
    await source.attach(moving, "a")
    assert cluster.shims.states() == {"live"}


async def test_give_up_is_repeated_for_a_node_that_starts_late(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node b receives Attach after GiveUp. Otherwise it would wait until its deadline for a member that has failed."""
    monkeypatch.setattr(on_nodes, "TELL_AGAIN_S", 0.01)
    await cluster.close_all()
    moving = cluster.begin()
    source, late = cluster.nodes["a"].communicators, cluster.nodes["b"].members
    await source.detach(moving)
    cluster.shims.waiting = {cluster.process[1], cluster.process[2]}
    cluster.shims.failing_process = cluster.process[0]
    asked, attach, give_up = asyncio.Event(), late.attach, late.give_up

    async def attach_late(request: pb.AttachRequest, caller: str) -> pb.AttachReply:
        await asked.wait()
        return await attach(request, caller)

    async def note(move: str, caller: str) -> pb.GiveUpReply:
        asked.set()
        return await give_up(move, caller)

    monkeypatch.setattr(late, "attach", attach_late)
    monkeypatch.setattr(late, "give_up", note)
    with pytest.raises(NcclFailed, match="on a: process"):
        await source.attach(moving, "a")


async def test_commit_requires_rebuilt_communicators(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    communicators.must_be_attached(moving)
    await cluster.nodes["a"].communicators.detach(moving)
    with pytest.raises(WrongState):
        communicators.must_be_attached(moving)
    moving.log.mark(Mark.STREAMED, attached=True)
    communicators.must_be_attached(moving)
