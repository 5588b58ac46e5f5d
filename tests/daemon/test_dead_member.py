"""An operator declares that a node with other members of a rank's communicators is dead, while a move is undone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, WrongState
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.dump import Dump
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.proc import host
from tests.daemon.gate_doubles import MOVE, WORLD, Cluster, Here, end

BY = "alice@desk (operator alice)"


@pytest.fixture
async def undone(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SourceSteps, Moving]:
    """A move whose communicators are down, and which is being undone, while node b does not answer."""

    async def nothing(*arguments: Any) -> None:
        return

    monkeypatch.setattr(Dump, "sweep", nothing)
    source: Any = cluster.nodes["a"]
    source.config.image_dir = tmp_path / "images"
    source.caches_left = {}
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    entry = SimpleNamespace(cgroup=str(cgroup), keeper_alive=lambda: True, link=None, moving=MOVE)
    source.ranks.get = lambda uid, role: entry
    steps = SourceSteps(source, lambda pids: "", source.communicators)
    await cluster.close_all()
    moving = steps.moves[MOVE] = cluster.begin(host.boot_id())
    rank = cluster.process[0]
    moving.log.mark(Mark.BEGUN, cgroup=str(cgroup), pid=rank.pid, start_ticks=rank.start_ticks)
    await source.communicators.detach(moving)
    moving.log.decide(Outcome.ABORT, "a test", "source")
    cluster.nodes["b"].reachable = False
    return steps, moving


async def test_gates_open_with_errors_once_a_dead_member_is_declared(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """Without the declaration the undo tries for ever. It is recorded, also by a node that hears of it later."""
    steps, moving = undone
    with pytest.raises(SnapshotError, match="the gates stay closed"):
        await steps.settle_once(moving)
    assert cluster.shims.of("open") == []
    outcome = await steps.declare_member_dead(MOVE, "b", BY)
    assert (outcome.settled, outcome.abandoned) == (True, True)
    assert f"{BY} declared b dead" in outcome.reason
    assert cluster.shims.of("open") == [(cluster.pid(0), "abandon")]
    found = Journal(cluster.nodes["a"].state_dir).get(MOVE)
    assert (found.last_mark, found.known.abandoned) == (Mark.SETTLED, True)
    assert f"{BY} declared b dead" in found.known.failure
    cluster.answers.outcome = outcome  # the node was only cut off: it asks, and its ranks get errors, too
    gate = cluster.nodes["b"].gates.moves[MOVE]
    async with gate.lock:
        await cluster.nodes["b"].gates._settle_once(gate)
    assert cluster.shims.closed == set()
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}
    assert (await steps.declare_member_dead(MOVE, "b", BY)).settled, "it can be repeated"


async def test_declaration_ends_an_attempt_that_is_under_way(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """The settle loop has the lock nearly all the time."""
    steps, moving = undone
    async with moving.lock:
        asked = asyncio.ensure_future(steps.declare_member_dead(MOVE, "b", BY))
        while not moving.given_up:  # noqa: ASYNC110 - nothing tells when a call waits for the lock
            await asyncio.sleep(0)
        await steps.settle_once(moving)
        assert moving.log.last_mark is Mark.SETTLED
        tried = [pid for pid, _ in cluster.shims.of("detach")][3:]  # after the step of the move
        assert tried == [cluster.pid(0)] * 2, "one attempt, not two; then what is left is taken down"
    assert (await asked).abandoned


async def test_declaration_survives_a_restart_of_the_source(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """The daemon dies between its record and the opening of the gates: the undo does not try to build any more."""
    steps, moving = undone
    await steps.communicators.give_up_building(moving, "it was declared dead")
    log = Journal(cluster.nodes["a"].state_dir).get(MOVE)
    again = steps.moves[MOVE] = Moving(log, nodes=moving.nodes, failure=log.known.failure)
    cluster.shims.said.clear()
    await steps.settle_once(again)
    assert "it was declared dead" in log.known.failure
    assert [what for what, _, _ in cluster.shims.said] == ["open"]


@pytest.mark.parametrize(
    ("node", "why"), [("b", "snapshotd on b answers"), ("a", "waits for no member"), ("c", "waits for no member")]
)
async def test_member_that_is_not_missed_cannot_be_declared_dead(
    cluster: Cluster, undone: tuple[SourceSteps, Moving], node: str, why: str
) -> None:
    steps, moving = undone
    cluster.nodes["b"].reachable = True
    with pytest.raises(WrongState, match=why):
        await steps.declare_member_dead(MOVE, node, BY)
    assert (moving.given_up, moving.log.record.abandoned) == ("", False)


@pytest.mark.parametrize("state", ["its driver is at work", "its lease has expired", "committed"])
async def test_member_of_a_move_that_is_not_undone_cannot_be_declared_dead(
    cluster: Cluster, undone: tuple[SourceSteps, Moving], state: str
) -> None:
    """Until ABORT is recorded the move may still end with COMMIT."""
    steps, moving = undone
    moving.log.outcome = None
    if state == "its driver is at work":
        moving.renew()
    elif state == "committed":
        moving.log.overrule(Outcome.COMMIT, "a test", "driver")
    with pytest.raises(WrongState, match="not known to wait for b"):
        await steps.declare_member_dead(MOVE, "b", BY)
    assert not moving.log.record.abandoned


async def test_move_that_is_committed_while_a_declaration_waits_is_not_abandoned(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    steps, moving = undone
    async with moving.lock:
        asked = asyncio.ensure_future(steps.declare_member_dead(MOVE, "b", BY))
        while not moving.given_up:  # noqa: ASYNC110 - nothing tells when a call waits for the lock
            await asyncio.sleep(0)
        moving.log.overrule(Outcome.COMMIT, "a test", "driver")
    with pytest.raises(WrongState, match="committed"):
        await asked
    assert (moving.given_up, moving.log.record.abandoned) == ("", False)


async def test_member_may_be_declared_dead_if_only_the_target_has_a_copy(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """COMMIT is recorded once the communicators are built with that copy, which would be never."""
    steps, moving = undone
    moving.log.outcome = None
    end(cluster.process[0])
    outcome = await steps.declare_member_dead(MOVE, "b", BY, only_check=True)
    assert outcome.kind == pb.UNDECIDED
    moving.log.mark(Mark.STREAMED, attached=True)  # now nothing is to be built any more
    with pytest.raises(WrongState, match="not known to wait for b"):
        await steps.declare_member_dead(MOVE, "b", BY, only_check=True)


async def test_check_of_a_declaration_changes_nothing(cluster: Cluster, undone: tuple[SourceSteps, Moving]) -> None:
    steps, moving = undone
    cluster.shims.said.clear()
    outcome = await steps.declare_member_dead(MOVE, "b", BY, only_check=True)
    assert (outcome.kind, outcome.abandoned, outcome.settled) == (pb.ABORT, False, False)
    assert (moving.given_up, moving.log.record.abandoned, cluster.shims.said) == ("", False, [])
    with pytest.raises(WrongState, match="waits for no member"):
        await steps.declare_member_dead(MOVE, "c", BY, only_check=True)


@pytest.mark.parametrize("why", ["a member is declared dead", "the rank has ended"])
async def test_member_that_was_attached_with_the_targets_copy_gets_errors(
    cluster: Cluster, undone: tuple[SourceSteps, Moving], tmp_path: Path, why: str
) -> None:
    """Its gate must not open in front of a communicator whose other members are gone: it would hang there."""
    steps, moving = undone
    cluster.nodes["d"] = Here("d", cluster, tmp_path / "d")
    moving.nodes.append(pb.NodeAddresses(name="d", endpoint="d:7070"))
    cluster.nodes["d"].entries.append(cluster.nodes["b"].entries.pop())  # rank 2
    await cluster.nodes["d"].gates.close(cluster.request)
    membership = {
        comm: [member.at("d") if member.rank_uid == "job-2" else member for member in members]
        for comm, members in (moving.log.record.communicators or {}).items()
    }
    moving.log.mark(Mark.STREAMED, communicators=membership, attached=True)
    member = cluster.shims.comms[cluster.process[2]][WORLD]
    member[2] = "live"
    if why == "the rank has ended":
        end(cluster.process[0])
        source: Any = cluster.nodes["a"]
        source.ranks.get = lambda uid, role: None
        await steps.departure.thaw(moving)
    else:
        await steps.communicators.give_up_building(moving, why)
        await steps.communicators.open_all(moving)
    assert moving.log.record.abandoned
    assert member[2] == "detached"
    heard = [what for what, pid, _ in cluster.shims.said if pid == cluster.pid(2)]
    assert heard.index("open") > max(number for number, what in enumerate(heard) if what == "detach")


async def test_committed_copy_runs_without_communicators_of_a_dead_member(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """The copy here is lost and the target's is about to be committed, for which the communicators would be built first."""
    steps, moving = undone
    await steps.communicators.give_up_building(moving, "it was declared dead")
    cluster.shims.said.clear()
    await steps._attach_late(moving)
    assert (moving.log.record.attached, moving.log.record.abandoned) == (True, True)
    assert cluster.shims.said == []


async def test_node_that_is_down_is_not_asked_to_take_communicators_down(
    cluster: Cluster, undone: tuple[SourceSteps, Moving]
) -> None:
    """If its packets are lost, that call ends after minutes only, during which all gates would stay closed."""
    steps, moving = undone
    cluster.nodes["b"].missed.clear()
    await steps.communicators.give_up_building(moving, "b was declared dead")
    assert cluster.nodes["b"].missed == ["get_node"]


async def test_rank_without_communicators_waits_for_none(cluster: Cluster, undone: tuple[SourceSteps, Moving]) -> None:
    """NCCL can have RDMA devices open without any communicator."""
    steps, moving = undone
    moving.log.mark(Mark.BEGUN, communicators={})
    cluster.shims.said.clear()
    await steps.communicators.put_back(moving)
    await steps.communicators.give_up_building(moving, "the rank that was to move has ended")
    assert (moving.waiting_for, moving.failure, moving.log.record.abandoned) == ("", "", False)
    assert cluster.shims.said == []
