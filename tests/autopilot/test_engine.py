"""The loop with fake daemons: it moves once, records first, goes on after a restart, and waits where it must."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from migrator.autopilot import chain, mover, silence
from migrator.autopilot.engine import Engine
from migrator.autopilot.model import MoveState, Node, NodeState
from migrator.autopilot.policy import Policy
from migrator.autopilot.store import Store
from migrator.autopilot.watcher import Sighting
from migrator.cluster import Cluster
from migrator.driver import attempt_id
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, Unreachable, Where
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.worlds import acting, move, rank
from tests.cli.conftest import a_rank

POLICY = acting(breaker={"nodes_percent": 80, "back_off_s": 300})


@contextlib.asynccontextmanager
async def running(pilots: PilotCluster, policy: Policy = POLICY) -> AsyncIterator[Store]:
    """An autopilot, and its store."""
    async with Store.open(pilots.path.parent / "state") as store:
        stop = asyncio.Event()
        task = asyncio.create_task(Engine(Cluster.read(pilots.path), policy, store).run(stop))
        try:
            yield store
        finally:
            stop.set()
            await task
            assert chain.problems(await store.events()) == []


async def until(what: str, condition: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        await asyncio.sleep(0.02)
    return found


async def results(store: Store, count: int = 1) -> list[tuple[str, str]]:
    """How moves ended, when at least that many have."""

    async def ended() -> list[tuple[str, str]]:
        moves = (await store.load()).moves
        found = [(one.target, one.state.value) for one in moves if one.state is not MoveState.INTENDED]
        return found if len(found) >= count else []

    found: list[tuple[str, str]] = await until(f"{count} moves", ended)
    return found


async def alerts(store: Store, part: str) -> str:
    async def found() -> str:
        return next((text for text in (await store.load()).alerts.values() if part in text), "")

    return str(await until(f"an alert with {part!r}", found))


async def test_alarm_taints_the_node_and_its_rank_moves_once(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        assert await results(store) == [("spare-1", "moved")]
        seen = len(pilots["node-1"].called("ListRanks"))

        async def looked_again() -> bool:
            return len(pilots["node-1"].called("ListRanks")) > seen + 3

        await until("further looks at the node", looked_again)
        stored = await store.load()
        assert stored.nodes["node-1"].state is NodeState.TAINTED
        kinds = [record.kind for record in await store.events()]
    assert pilots.places() == {"train-0-00000001": "spare-1"}
    assert pilots.begun() == 1
    order = [kind for kind in kinds if kind in ("signal", "state", "intent", "result")]
    assert order == ["signal", "state", "intent", "result"]


async def test_observing_policy_moves_nothing(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    async with running(pilots, acting("observe")) as store:
        pilots["node-1"].raise_alarm()

        async def suspect() -> bool:
            nodes = (await store.load()).nodes
            return "node-1" in nodes and nodes["node-1"].state is NodeState.SUSPECT

        await until("the node to be suspect", suspect)
    assert pilots.begun() == 0


async def test_without_a_spare_it_alerts_and_waits_until_there_is_one(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    async with Store.open(pilots.path.parent / "state") as store:
        for spare in ("spare-1", "spare-2"):
            await store.set_node(spare, NodeState.TAINTED, "in repair", "alice")
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        assert "spare-1, spare-2: is tainted" in await alerts(store, "no node can take it")
        assert pilots.begun() == 0
        async with Store.open(pilots.path.parent / "state") as other:  # as `migrator untaint` does
            await other.set_node("spare-2", NodeState.HEALTHY, "repaired", "alice")
        assert await results(store) == [("spare-2", "moved")]

        async def over() -> bool:
            return not (await store.load()).alerts

        await until("the alert to end", over)


async def test_undone_move_is_tried_with_another_spare(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].fails_to.add("spare-1")
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        assert await results(store, 2) == [("spare-1", "undone"), ("spare-2", "moved")]


async def test_drained_node_is_emptied_one_rank_of_a_job_at_a_time(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", number) for number in range(3)]
    async with running(pilots, acting("drain", breaker={"nodes_percent": 50, "moves": 9})) as store:
        pilots["node-1"].raise_alarm()
        await results(store, 3)

        async def drained() -> bool:
            return (await store.load()).nodes["node-1"].state is NodeState.DRAINED

        await until("the node to be drained", drained)
        records = await store.events()
    steps = [record.kind for record in records if record.kind in ("intent", "result")]
    assert steps == ["intent", "result"] * 3
    assert set(pilots.places().values()) == {"spare-1"}


async def test_systematic_alarm_stops_everything(pilots: PilotCluster) -> None:
    for node in ("node-1", "node-2", "node-3"):
        pilots[node].ranks.append(a_rank(node, job=f"job-{node}"))
        pilots[node].raise_alarm("link-flaps")
    async with running(pilots) as store:
        assert "looks systematic" in await alerts(store, "systematic")
    assert pilots.begun() == 0


async def test_silent_node_does_not_keep_a_rank_that_another_one_lists(pilots: PilotCluster, tmp_path: Path) -> None:
    async with Store.open(tmp_path / "state") as store:
        engine = Engine(Cluster.read(pilots.path), POLICY, store)
        for asked, name in ((20.0, "spare-1"), (10.0, "node-1")):
            sighting = Sighting(Node(name), (rank(0, name),), asked)
            engine.watchers[name].sighting = sighting
        assert [one.node for one in (await engine.world()).ranks] == ["node-1", "spare-1"], "each speaks for itself"
        engine.watchers["node-1"].error = Unreachable("it is silent")
        assert [one.node for one in (await engine.world()).ranks] == ["spare-1"], "the rank has left it meanwhile"
        engine.watchers["spare-1"].error = Unreachable("it is silent")
        assert [one.node for one in (await engine.world()).ranks] == ["spare-1"]


# ---------------------------------------------------------------------- restarts


async def intended_before(pilots: PilotCluster, **fields: Any) -> str:
    """A store whose autopilot was killed after it recorded an intent, and the id of the move."""
    one = replace(rank(0, "node-1"), uid="train-0-00000001")
    async with Store.open(pilots.path.parent / "state") as store:
        await store.intend(move(one, "spare-1", MoveState.INTENDED, id="m-00000000000a", **fields))
    return "m-00000000000a"


async def test_killed_between_intent_and_move_nothing_is_done_twice(pilots: PilotCluster) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    await intended_before(pilots)
    async with running(pilots) as store:  # without an alarm now: the intent alone moves nothing
        assert await results(store) == [("spare-1", "never began")]
        assert pilots.begun() == 0
        pilots["node-1"].raise_alarm()
        assert await results(store, 2) == [("spare-1", "never began"), ("spare-1", "moved")]
    assert pilots.begun() == 1


@pytest.mark.parametrize("attempt", [0, 2])
@pytest.mark.parametrize(("outcome", "state"), [(pb.COMMIT, "moved"), (pb.ABORT, "undone")])
async def test_killed_during_a_move_its_end_is_found_in_the_journals(
    pilots: PilotCluster, attempt: int, outcome: Any, state: str
) -> None:
    known = attempt_id(await intended_before(pilots), attempt)
    pilots["node-1"].moves.append(
        pb.MoveRecord(
            move=known,
            role="source",
            source_node="node-1",
            target_node="spare-1",
            rank_uid="train-0-00000001",
            outcome=outcome,
            begun_unix_s=1.0,
            ended_unix_s=2.0,
            mark="settled",
            pause_s=1.5,
        )
    )
    async with running(pilots) as store:
        assert await results(store) == [("spare-1", state)]
        assert (await store.load()).moves[0].pause_s == 1.5
    assert pilots.begun() == 0


async def test_unfinished_move_is_waited_for_and_never_repeated(pilots: PilotCluster) -> None:
    known = await intended_before(pilots)
    named: dict[str, Any] = {"source_node": "node-1", "target_node": "spare-1", "rank_uid": "train-0-00000001"}
    record = pb.MoveRecord(move=known, role="source", mark="frozen", begun_unix_s=1.0, **named)
    pilots["node-1"].moves.append(record)
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].raise_alarm()
    async with running(pilots) as store:

        async def asked_often() -> bool:
            return len(pilots["node-1"].called("ListMoves")) > 3

        await until("the journal to be read", asked_often)
        assert [one.state for one in (await store.load()).moves] == [MoveState.INTENDED]
        assert pilots.begun() == 0
        record.outcome, record.ended_unix_s, record.mark = pb.ABORT, 2.0, "settled"
        pilots["node-1"].moves[:] = [record]
        assert (await results(store, 2))[0] == ("spare-1", "undone")


async def test_nothing_is_concluded_while_source_or_target_is_silent(pilots: PilotCluster, tmp_path: Path) -> None:
    await intended_before(pilots)
    pilots.stop("spare-1")
    async with Store.open(tmp_path / "state") as store:
        (intent,) = (await store.load()).moves
        assert not await mover.settle(Cluster.read(pilots.path), store, intent)
        assert [one.state for one in (await store.load()).moves] == [MoveState.INTENDED]


async def test_rank_that_has_left_meanwhile_is_not_moved(pilots: PilotCluster, tmp_path: Path) -> None:
    await intended_before(pilots)
    pilots["node-2"].ranks.append(a_rank("node-2"))
    async with Store.open(tmp_path / "state") as store:
        (intent,) = (await store.load()).moves
        await mover.carry_out(Cluster.read(pilots.path), store, intent, lambda event: None)
        (ended,) = (await store.load()).moves
    assert (ended.state, pilots.begun()) == (MoveState.NEVER_BEGAN, 0)


async def test_recorded_id_is_the_one_that_the_daemons_journal(pilots: PilotCluster, tmp_path: Path) -> None:
    known = await intended_before(pilots)
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].failures["Freeze"] = Changed("a thread has appeared", where=Where.SOURCE_RUNNING)
    async with Store.open(tmp_path / "state") as store:
        (intent,) = (await store.load()).moves
        await mover.carry_out(Cluster.read(pilots.path), store, intent, lambda event: None)
    begun = [request.move for method, request in pilots["node-1"].asked if method == "Begin"]
    assert begun == [known, attempt_id(known, 1), attempt_id(known, 2)]


# ---------------------------------------------------------------------- silence


async def test_silent_node_counts_only_if_two_others_cannot_reach_it(
    pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "EVERY_S", 0.2)
    policy = acting(unreachable_s=0)
    for node in ("node-2", "node-3", "spare-1", "spare-2"):
        pilots[node].finds = pb.FindNodeReply(daemon_answers=True, found="it answers")
    pilots.stop("node-1")
    async with running(pilots, policy) as store:

        async def asked() -> bool:
            return len(pilots["node-2"].called("FindNode")) > 1

        await until("others to be asked", asked)
        assert (await store.load()).alarms == ()
        for node in ("node-2", "node-3", "spare-1", "spare-2"):
            pilots[node].finds = pb.FindNodeReply(daemon_answers=False, found="it does not answer")

        async def raised() -> bool:
            return [alarm.check for alarm in (await store.load()).alarms] == [silence.CHECK]

        await until("the alarm", raised)
