"""Undoing a move of a job with communicators: what the source builds again, and when gates open."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NcclFailed, Unreachable, Where
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.departure import Departure
from snapshotd.moves.source.dump import Dump
from snapshotd.proc import host
from tests.daemon.gate_doubles import MOVE, PAIR, WORLD, Cluster, end


async def test_undo_rebuilds_communicators_that_the_targets_copy_had(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    for comms in [cluster.shims.comms[cluster.process[rank]] for rank in (1, 2)]:
        for member in comms.values():
            member[2] = "live"  # built with the target's copy, before the move failed
    cluster.shims.said.clear()
    await source.put_back(moving)
    order = [what for what, _, _ in cluster.shims.said]
    assert order[:3] == ["detach"] * 3
    assert order[-3:] == ["attach"] * 3
    assert cluster.shims.states() == {"live"}
    moving.log.decide(Outcome.ABORT, "a test", "source")
    await source.open_all(moving)
    assert cluster.shims.closed == set()


async def test_undo_retries_at_once_and_can_be_repeated(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    cluster.shims.failing["attach"] = 1
    await source.put_back(moving)
    assert cluster.shims.states() == {"live"}
    cluster.nodes["b"].reachable = False
    with pytest.raises(Unreachable):
        await source.put_back(moving)
    cluster.nodes["b"].reachable = True
    await source.put_back(moving)
    assert moving.failure == ""


async def test_undo_tries_for_as_long_as_it_takes_behind_closed_gates(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member cannot be reached for an hour. No gate opens in front of a missing communicator."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    cluster.nodes["b"].reachable = False
    now_s = host.boottime_s()
    for minute in range(0, 60, 10):
        monkeypatch.setattr(host, "boottime_s", lambda minute=minute: now_s + 60.0 * minute)
        with pytest.raises(Unreachable, match="not built again yet, and the gates stay closed"):
            await source.put_back(moving)
    gate = cluster.nodes["b"].gates.moves[MOVE]
    async with gate.lock:
        await cluster.nodes["b"].gates._settle_once(gate)  # the source is silent for an hour
    assert "communicators are down here" in gate.waiting_for
    assert (moving.failure, cluster.shims.of("open")) == ("", [])
    cluster.nodes["b"].reachable = True
    await source.put_back(moving)
    assert cluster.shims.states() == {"live"}


async def test_undo_says_from_its_start_which_nodes_it_waits_for(cluster: Cluster) -> None:
    """An attempt may take minutes. Later ones repeat why the last one failed: which node does not answer."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    seen: list[str] = []
    cluster.shims.before = lambda what: seen.append(moving.waiting_for)
    cluster.nodes["b"].reachable = False
    moving.waiting_for = "ABORT"
    with pytest.raises(Unreachable):
        await source.put_back(moving)
    assert "being built again on a, b" in seen[0]
    assert "node b could not be reached" in seen[-1]  # the second attempt
    seen.clear()
    moving.waiting_for = "ABORT"  # the next round of settling
    with pytest.raises(Unreachable):
        await source.put_back(moving)
    assert "node b could not be reached" in seen[0]
    cluster.nodes["b"].reachable = True
    await source.put_back(moving)
    seen.clear()
    await source.put_back(moving)
    assert "being built again on a, b" in seen[0]


async def test_source_that_an_operator_declared_dead_opens_gates_with_errors(cluster: Cluster) -> None:
    """The target, which was told, says that nobody builds the communicators again. Without that the gate stays closed."""
    await cluster.close_all()
    await cluster.nodes["a"].communicators.detach(cluster.begin())
    gates = cluster.nodes["b"].gates
    gate = gates.moves[MOVE]
    cluster.answers.copy = pb.Copy(state=pb.Copy.DISCARDED)
    gate.answered_s = -1e9  # the source is silent for long
    async with gate.lock:
        await gates._settle_once(gate)
        assert "communicators are down here" in gate.waiting_for
        assert cluster.shims.of("open") == []
        cluster.answers.copy = pb.Copy(state=pb.Copy.DISCARDED, abandoned=True)
        await gates._settle_once(gate)
    assert sorted(cluster.shims.of("open")) == sorted([(cluster.pid(1), "abandon"), (cluster.pid(2), "abandon")])
    assert gate.log.last_mark is Mark.SETTLED


async def test_target_that_a_false_declaration_let_run_opens_gates_with_errors(cluster: Cluster) -> None:
    """The source's daemon was only down. It accepts the declaration, and does not know that communicators were given up."""
    await cluster.close_all()
    await cluster.nodes["a"].communicators.detach(cluster.begin())
    gates = cluster.nodes["b"].gates
    gate = gates.moves[MOVE]
    cluster.answers.outcome = pb.Outcome(kind=pb.COMMIT, settled=True, where=Where.TARGET_RUNNING.value)
    async with gate.lock:
        await gates._settle_once(gate)  # the target does not answer
        assert cluster.shims.of("open") == []
        cluster.answers.copy = pb.Copy(state=pb.Copy.RUNNING, abandoned=True)
        await gates._settle_once(gate)
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}
    assert gate.log.last_mark is Mark.SETTLED


async def test_gate_that_is_told_too_early_does_not_open(cluster: Cluster) -> None:
    """Whatever a daemon believes, the process itself refuses, and the next attempt succeeds."""
    await cluster.close_all()
    moving = cluster.begin()
    source, gates = cluster.nodes["a"].communicators, cluster.nodes["b"].gates
    await source.detach(moving)
    with pytest.raises(NcclFailed):
        await gates.open(MOVE, cluster.token("COMMIT"), "operator")
    assert cluster.shims.closed >= {cluster.process[1], cluster.process[2]}
    for comms in cluster.shims.comms.values():
        for member in comms.values():
            member[2] = "live"
    assert (await gates.open(MOVE, cluster.token("COMMIT"), "operator")).opened


async def test_limit_grows_with_members_and_communicators(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    cluster.nodes["a"].config.nccl_timeout_s = 100
    cluster.nodes["a"].config.nccl_member_timeout_ms = 2000
    await source.detach(moving)
    await source.attach(moving, "a")
    assert cluster.shims.limits_s == [100 + 2.0 * (3 + 2)] * 3


async def test_undo_does_not_wait_for_a_member_that_has_ended(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    end(cluster.process[2])
    await source.put_back(moving)
    assert "has ended" in moving.failure
    moving.log.decide(Outcome.ABORT, "a test", "source")
    await source.open_all(moving)
    assert cluster.shims.closed == {cluster.process[2]}  # the others opened, and get NCCL's errors
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}


async def test_undo_does_not_wait_for_a_member_that_has_replaced_its_program(cluster: Cluster) -> None:
    """Its gate and communicators are gone with the program, and it will never be a member again."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    replaced = cluster.process[2]
    cluster.shims.failing_process = replaced
    with pytest.raises(NcclFailed):
        await source.put_back(moving)
    cluster.shims.closed.discard(replaced)
    await source.put_back(moving)
    assert "has replaced its program" in moving.failure
    assert moving.log.record.abandoned


async def test_undo_does_not_wait_for_a_node_that_has_opened_its_gates(cluster: Cluster) -> None:
    """Nothing was down there when its source had been silent for long. A process behind an open gate is no member again."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    gate = cluster.nodes["b"].gates.moves[MOVE]
    gate.log.decide(Outcome.ABORT, "the source is silent for too long", "source")
    gate.log.mark(Mark.SETTLED)
    await source.put_back(moving)
    assert "the gates here were opened" in moving.failure
    assert moving.log.record.abandoned


async def test_node_that_missed_the_undo_asks_and_opens_its_gates(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    moving.log.decide(Outcome.ABORT, "a test", "source")
    cluster.nodes["b"].reachable = False
    await cluster.nodes["a"].communicators.open_all(moving)
    assert cluster.shims.closed == {cluster.process[1], cluster.process[2]}
    cluster.answers.outcome = pb.Outcome(kind=pb.ABORT, settled=True)
    gate = cluster.nodes["b"].gates.moves[MOVE]
    gate.changed.set()
    assert gate.settling is not None
    await gate.settling
    assert cluster.shims.closed == set()


# ---------------------------------------------------------------- a source that cannot build any more


async def thaw_without_the_rank(
    cluster: Cluster, moving: Moving, folder: Path, monkeypatch: pytest.MonkeyPatch, entry: Any
) -> None:
    """ABORT stands on the source, whose rank cannot be a member again. `entry` is what is known of its keeper."""

    async def nothing(*arguments: Any) -> None:
        return

    monkeypatch.setattr(Dump, "sweep", nothing)
    source: Any = cluster.nodes["a"]
    source.config.image_dir = folder / "images"
    source.caches_left, source.lost = {}, nothing
    source.ranks.get = lambda uid, role: entry
    moving.log.mark(Mark.BEGUN, cgroup=str(folder / "no-cgroup"))
    moving.log.decide(Outcome.ABORT, "a test", "source")
    await Departure(source, source.communicators).thaw(moving)


@pytest.mark.parametrize("lost", ["keeper died", "node rebooted", "cgroup is gone"])
async def test_source_that_has_lost_the_rank_opens_gates_with_errors(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Nobody builds the communicators again. The other ranks must get NCCL's errors, not hang."""
    await cluster.close_all()
    moving = cluster.begin()
    await cluster.nodes["a"].communicators.detach(moving)
    cgroup = str(tmp_path / "no-cgroup")
    entry = SimpleNamespace(cgroup=cgroup, keeper_alive=lambda: lost != "keeper died", link=None, moving=MOVE)
    await thaw_without_the_rank(cluster, moving, tmp_path, monkeypatch, None if lost == "node rebooted" else entry)
    assert moving.log.last_mark is Mark.SETTLED
    assert moving.log.known.abandoned
    assert "can never be built again" in moving.log.known.failure
    assert not cluster.shims.closed & {cluster.process[1], cluster.process[2]}
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}


async def test_source_whose_communicators_are_up_opens_gates_without_errors(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is lost before its communicators were taken down: nothing is abandoned."""
    await cluster.close_all()
    moving = cluster.begin()
    await thaw_without_the_rank(cluster, moving, tmp_path, monkeypatch, None)
    assert (moving.log.last_mark, moving.log.known.abandoned) == (Mark.SETTLED, False)
    assert {more for _, more in cluster.shims.of("open")} == {None}


@pytest.mark.parametrize("how", ["asks", "has the source's token", "has learned it before a restart"])
async def test_gate_gives_up_communicators_that_a_settled_source_left_down(cluster: Cluster, how: str) -> None:
    """As a source of an older version does, which does not say that it has abandoned them."""
    await cluster.close_all()
    await cluster.nodes["a"].communicators.detach(cluster.begin())
    gates = cluster.nodes["b"].gates
    gate = gates.moves[MOVE]
    cluster.answers.outcome = pb.Outcome(kind=pb.ABORT, settled=True)
    if how == "has the source's token":
        with contextlib.suppress(NcclFailed):
            await gates.open(MOVE, cluster.token("ABORT"), "a")
    elif how == "has learned it before a restart":
        gate.log.decide(Outcome.ABORT, "the source has put the rank back", "source")
        with contextlib.suppress(NcclFailed):
            async with gate.lock:
                await gates._settle_once(gate)
    async with gate.lock:
        await gates._settle_once(gate)
    assert gate.log.last_mark is Mark.SETTLED
    assert not cluster.shims.closed & {cluster.process[1], cluster.process[2]}


@pytest.mark.parametrize("learned", [False, True])
async def test_gate_stays_closed_while_the_source_still_builds(cluster: Cluster, learned: bool) -> None:
    """ABORT is recorded at once, and the source builds after that. Only SETTLED is the end of it."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    gates = cluster.nodes["b"].gates
    gate = gates.moves[MOVE]
    if learned:
        gate.log.decide(Outcome.ABORT, "a test", "source")
    for answer in (pb.Outcome(kind=pb.UNDECIDED), pb.Outcome(kind=pb.ABORT), None):
        cluster.answers.outcome = answer
        with contextlib.suppress(NcclFailed):
            async with gate.lock:
                await gates._settle_once(gate)
        assert not gate.log.record.abandoned
        assert cluster.shims.closed >= {cluster.process[1], cluster.process[2]}
    if not learned:
        await source.put_back(moving)
        assert cluster.shims.states() == {"live"}


# ---------------------------------------------------------------- members that destroy a communicator while it is down


async def test_communicator_that_a_member_has_destroyed_is_given_up_for_all(cluster: Cluster) -> None:
    """A destroy does not wait at the gate. Without it the undo would wait for that member for ever. The rest is built."""
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    cluster.shims.destroy(cluster.process[1], PAIR)
    with pytest.raises(NcclFailed, match=f"rank 1 has destroyed communicator {PAIR}"):
        await source.attach(moving, "a")
    await source.put_back(moving)
    states = {comm: member[2] for comm, member in cluster.shims.comms[cluster.process[0]].items()}
    assert states == {WORLD: "live", PAIR: "detached"}
    assert f"communicator {PAIR} by job-1 on b" in moving.failure
    moving.log.decide(Outcome.ABORT, "a test", "source")
    await source.open_all(moving)
    assert cluster.shims.closed == set()
    assert {more for _, more in cluster.shims.of("open")} == {"abandon"}  # makes PAIR an error, and WORLD stays


async def test_communicator_that_all_members_have_destroyed_is_forgotten(cluster: Cluster) -> None:
    await cluster.close_all()
    moving = cluster.begin()
    source = cluster.nodes["a"].communicators
    await source.detach(moving)
    for rank in (0, 1):
        cluster.shims.destroy(cluster.process[rank], PAIR)
    await source.put_back(moving)
    assert (moving.failure, moving.log.record.abandoned) == ("", False)
    assert cluster.shims.states() == {"live"}
    moving.log.decide(Outcome.ABORT, "a test", "source")
    await source.open_all(moving)
    assert {more for _, more in cluster.shims.of("open")} == {None}
