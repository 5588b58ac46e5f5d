"""A node that lies: what it says changes nothing about other nodes' ranks, and does not stop the autopilot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from migrator.autopilot import watcher
from migrator.autopilot.model import MoveState, NodeState
from migrator.autopilot.store import Store
from snapshotd.api import snapshotd_pb2 as pb
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import results, running, until
from tests.autopilot.worlds import move, rank
from tests.cli.conftest import a_rank

HOSTILE, HONEST = "node-1", "node-2"


async def test_a_node_cannot_have_ranks_of_another_node_moved(pilots: PilotCluster) -> None:
    real = a_rank(HONEST)
    pilots[HONEST].ranks.append(real)
    pilots[HOSTILE].claims.append(real)
    pilots[HOSTILE].raise_alarm()
    async with running(pilots) as store:
        assert await results(store) != []
    assert pilots.places() == {real.uid: HONEST}
    assert pilots[HONEST].called("Begin") == []


async def test_a_node_cannot_hide_ranks_of_another_node_that_must_leave_it(pilots: PilotCluster) -> None:
    real = a_rank(HONEST)
    pilots[HONEST].ranks.append(real)
    pilots[HOSTILE].claims.append(real)
    pilots[HONEST].raise_alarm()
    async with running(pilots) as store:

        async def moved() -> bool:
            return any(move.state is MoveState.MOVED for move in (await store.load()).moves)

        await until("the move", moved)
    assert pilots.places()[real.uid].startswith("spare")


async def test_a_node_cannot_use_up_the_attempts_of_another_nodes_rank(pilots: PilotCluster) -> None:
    real = a_rank(HONEST)
    claimed = replace(rank(0, HOSTILE), uid=real.uid)
    async with Store.open(pilots.path.parent / "state") as store:
        for number in range(3):
            await store.intend(move(claimed, "spare-1", MoveState.INTENDED, id=f"m-00000000000{number}"))
            await store.finish(f"m-00000000000{number}", MoveState.REFUSED, "it was never there")
        await store.intend(move(claimed, "spare-2", MoveState.INTENDED, id="m-00000000000a"))
    pilots[HONEST].ranks.append(real)
    pilots[HONEST].raise_alarm()
    async with running(pilots) as store:
        assert ("spare-1", "moved") in await results(store, 5)


async def test_a_node_cannot_keep_another_nodes_move_from_being_settled(pilots: PilotCluster) -> None:
    real = replace(rank(0, HONEST), uid="train-0-00000001")
    async with Store.open(pilots.path.parent / "state") as store:
        await store.intend(move(real, "spare-1", MoveState.INTENDED, id="m-00000000000a"))
    for source, target in ((HONEST, "spare-1"), (HOSTILE, "spare-1")):
        named: dict[str, Any] = {"source_node": source, "target_node": target, "rank_uid": real.uid}
        pilots[HOSTILE].moves.append(
            pb.MoveRecord(move="m-00000000000a", role="source", mark="frozen", begun_unix_s=9.0, **named)
        )
    named = {"source_node": HONEST, "target_node": "spare-1", "rank_uid": real.uid}
    ended = pb.MoveRecord(
        move="m-00000000000a", role="source", outcome=pb.ABORT, ended_unix_s=2.0, mark="settled", **named
    )
    pilots[HONEST].moves.append(ended)
    async with running(pilots) as store:
        assert await results(store) == [("spare-1", "undone")]


@pytest.mark.parametrize(
    "reply",
    [
        pb.Health(epoch="e1", sequence=1 << 63),
        pb.Health(epoch="e1", events=[pb.HealthEvent(sequence=(1 << 64) - 1)]),
        pb.Health(epoch="e" * 3000),
        pb.Health(epoch="e1", alarms=[pb.Alarm(check="c" * 3000)]),
        pb.Health(epoch="e1", alarms=[pb.Alarm(text="c" * 1_000_000)]),
        pb.Health(epoch="e1", alarms=[pb.Alarm(check="c", count=(1 << 64) - 1)]),
        pb.Health(epoch="e1", alarms=[pb.Alarm(check=f"c{number}") for number in range(5000)]),
        pb.Health(epoch="e1", events=[pb.HealthEvent(sequence=number) for number in range(5000)]),
        pb.Health(epoch="e1", events=[pb.HealthEvent(sequence=1, text="c" * 1_000_000)]),
    ],
)
async def test_a_report_that_no_daemon_makes_is_refused_and_stops_nothing(
    pilots: PilotCluster, reply: pb.Health
) -> None:
    pilots[HOSTILE].report = reply
    pilots[HONEST].ranks.append(a_rank(HONEST))
    async with running(pilots) as store:
        pilots[HONEST].raise_alarm()
        assert (await results(store))[0][1] == "moved"

        async def suspected() -> bool:
            nodes = (await store.load()).nodes
            return HOSTILE in nodes and nodes[HOSTILE].state is NodeState.SUSPECT

        await until("the node to be suspected", suspected)


async def test_a_node_that_reports_without_end_fills_no_disk(
    pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "BURST", 50)
    pilots[HOSTILE].report = pb.Health(more=True)  # and each one is of a new epoch
    pilots[HONEST].ranks.append(a_rank(HONEST))
    async with running(pilots) as store:

        async def flooded() -> bool:
            return any(event.kind == "flood" for event in await store.events())

        await until("the flood to be noticed", flooded)
        pilots[HONEST].raise_alarm()
        assert (await results(store))[0][1] == "moved"
        asked = len(pilots[HOSTILE].called("GetHealth"))
        mine = [event for event in await store.events() if event.node == HOSTILE]
        assert len([event for event in mine if event.kind == "flood"]) == 1
        assert len(mine) < 100
        assert asked < 100, "it is not asked all the time either"
