"""All communicators of a job are taken down for its suspension or snapshot, and built again; shims and nodes are doubles."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, Undone, Unreachable
from snapshotd.moves.jobs.communicators import JobCommunicators
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import JobPart
from snapshotd.moves.rules import Mark
from snapshotd.proc import host
from tests.daemon.gate_doubles import ALICE, MOVE, NONCE, PAIR, WORLD, Cluster, end


def coordinated(cluster: Cluster) -> tuple[JobCommunicators, Moving]:
    """Node a coordinates a snapshot of the job."""
    here = ("a", "a:7070")
    begin = Begin(MOVE, "job", "", "job", 0, *here, *here, NONCE.hex(), host.boot_id(), 1.0, 30.0, ALICE)
    move_log = cluster.nodes["a"].journal.begin(begin)
    parts = [
        JobPart.of(
            pb.Participant(rank_uid=f"job-{rank}", rank=rank, move=f"m-{rank:012x}", node=on, endpoint=f"{on}:7070")
        )
        for rank, on in enumerate("abb")
    ]
    move_log.mark(Mark.BEGUN, participants=parts, gated=True)
    return JobCommunicators(cluster.nodes["a"].communicators), Moving(move_log)


async def close(cluster: Cluster) -> None:
    request = cluster.request
    request.target_node, request.target_endpoint, request.whole_job = "a", "a:7070", True
    for name in "ab":
        await cluster.nodes[name].gates.close(request)


def are_forgotten(cluster: Cluster) -> bool:
    return not any(node.gates.closed() for node in cluster.nodes.values())


async def test_communicators_are_down_on_all_ranks_until_they_are_built_and_gates_open(cluster: Cluster) -> None:
    job, moving = coordinated(cluster)
    await close(cluster)
    assert (await job.detach(moving)).comms == 2
    assert cluster.shims.states() == {"detached"}
    assert len(cluster.shims.closed) == 3
    reply = await job.attach(moving)
    assert (reply.comms, reply.abandoned) == (2, "")
    assert cluster.shims.states() == {"live"}
    assert cluster.shims.closed == set()
    assert are_forgotten(cluster)
    said = len(cluster.shims.said)
    await job.attach(moving)
    assert len(cluster.shims.said) == said, "it is done once"


async def test_communicator_with_a_member_that_no_node_knows_is_not_taken_down(cluster: Cluster) -> None:
    job, moving = coordinated(cluster)
    await close(cluster)
    del cluster.shims.comms[cluster.process[2]][WORLD]
    with pytest.raises(Undone, match=f"communicator {WORLD} has 3 members, and only .0, 1. of them are there"):
        await job.detach(moving)
    assert cluster.shims.states() == {"live"}
    await job.attach(moving)
    assert cluster.shims.closed == set()
    assert cluster.shims.of("attach") == [], "nothing was down"


async def test_rank_that_has_ended_leaves_its_communicators_down_and_the_gates_open(cluster: Cluster) -> None:
    """The job gets NCCL's errors, as it does without us. Other communicators are built again."""
    job, moving = coordinated(cluster)
    await close(cluster)
    await job.detach(moving)
    end(cluster.process[2])
    reply = await job.attach(moving)
    assert f"communicator {WORLD} has 3 members" in reply.abandoned
    assert cluster.shims.comms[cluster.process[0]] == {WORLD: [3, 0, "detached"], PAIR: [2, 1, "live"]}
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}
    assert are_forgotten(cluster)


async def test_failed_attempt_is_repeated_with_the_members_that_had_built_theirs(cluster: Cluster) -> None:
    job, moving = coordinated(cluster)
    await close(cluster)
    await job.detach(moving)
    cluster.shims.failing_process = cluster.process[1]
    cluster.shims.waiting = {cluster.process[0], cluster.process[2]}
    with pytest.raises(Exception, match="cannot attach"):
        await job.attach(moving)
    assert len(cluster.shims.closed) == 3, "gates stay closed"
    cluster.shims.failing_process, cluster.shims.waiting = None, set()
    assert (await job.attach(moving)).comms == 2
    assert cluster.shims.closed == set()


async def test_gates_stay_closed_while_a_node_does_not_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, moving = coordinated(cluster)
    await close(cluster)
    await job.detach(moving)
    cluster.nodes["b"].reachable = False
    with pytest.raises(Unreachable):
        await job.attach(moving)
    assert len(cluster.shims.closed) == 3
    moving.answered_s -= 300
    assert "b did not answer for 240 s" in (await job.attach(moving)).abandoned
    assert cluster.shims.closed == {cluster.process[1], cluster.process[2]}
    # When the node is back it asks, and learns that the record is settled.
    cluster.answers.outcome = pb.Outcome(kind=pb.ABORT, settled=True)
    gates = cluster.nodes["b"].gates
    async with gates.moving(MOVE).lock:
        await gates._settle_once(gates.moving(MOVE))
    assert cluster.shims.closed == set()


async def test_gates_whose_processes_have_all_ended_do_not_wait_for_a_coordinator_that_is_lost(
    cluster: Cluster,
) -> None:
    """The job was rolled back by another one: its next snapshot closes the gates of other processes."""
    job, moving = coordinated(cluster)
    await close(cluster)
    await job.detach(moving)
    cluster.answers.outcome = None
    gates = cluster.nodes["b"].gates
    for process in (cluster.process[1], cluster.process[2]):
        async with gates.moving(MOVE).lock:
            await gates._settle_once(gates.moving(MOVE))
        assert gates.closed(), "one of them waits behind its gate"
        end(process)
    async with gates.moving(MOVE).lock:
        await gates._settle_once(gates.moving(MOVE))
    assert not gates.closed()


async def test_only_the_coordinator_opens_the_gates_of_a_job(cluster: Cluster) -> None:
    job, moving = coordinated(cluster)
    await close(cluster)
    gates = cluster.nodes["b"].gates
    with pytest.raises(Denied):
        await gates.open(MOVE, cluster.token("ABORT"), "b")
    cluster.answers.outcome = pb.Outcome(kind=pb.COMMIT)  # recorded, and not carried out by all nodes
    async with gates.moving(MOVE).lock:
        await gates._settle_once(gates.moving(MOVE))
    assert len(cluster.shims.closed) == 3
    await job.put_back(moving)
    assert cluster.shims.closed == set()
