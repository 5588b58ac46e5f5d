"""A move that begins right after its own preflight uses what that found, once, and only for the same process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Undone, Where
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.closed_files import Scope
from snapshotd.moves.journal import Journal
from snapshotd.moves.source import inspection
from snapshotd.moves.source.inspection import FRESH_S, MAX_LOOKS, Looked, Remembered
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.proc import host

UID = "train-0-00000001"
REFUSAL = pb.Check(name="namespaces", verdict=pb.Check.REFUSE, reason="a test")


def entry(**fields: Any) -> RankEntry:
    given: dict[str, Any] = {
        "uid": UID,
        "job": "train",
        "rank": 0,
        "role": "home",
        "keeper_pid": 1,
        "keeper_start_ticks": 1,
        "cgroup": "/",
        "home_node": "node-1",
        "home_endpoint": "",
        "relay_key": "",
        "boot_id": "",
        "user_id": 1000,
        "pid": 4711,
        "start_ticks": 99,
    }
    return RankEntry(**(given | fields))


def found(pid: int = 4711, start_ticks: int = 99) -> Looked:
    process = pb.ProcessId(pid=pid, start_ticks=start_ticks)
    return Looked(pb.RankFacts(rank=pb.Rank(uid=UID, process=process), threads=3), [], Scope(1.0, [], set()))


def test_facts_are_used_once() -> None:
    remembered = Remembered()
    name = remembered.put(found(), [])
    assert remembered.take(name, entry()) == found()
    assert remembered.take(name, entry()) is None


def test_facts_of_another_process_or_rank_are_not_used() -> None:
    remembered = Remembered()
    for other in (entry(start_ticks=100), entry(pid=4712), entry(uid="train-1-00000002")):
        name = remembered.put(found(), [])
        assert remembered.take(name, other) is None
    assert Remembered().take("", entry(uid="", pid=0, start_ticks=0)) is None


def test_old_facts_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(host, "boottime_s", lambda: now_s)
    remembered = Remembered()
    name = remembered.put(found(), [])
    now_s += FRESH_S - 1
    assert remembered.take(name, entry()) is not None
    name = remembered.put(found(), [])
    now_s += FRESH_S + 1
    assert remembered.take(name, entry()) is None


def test_refused_facts_are_not_kept() -> None:
    remembered = Remembered()
    assert remembered.put(found(), [REFUSAL]) == ""
    assert remembered.take("", entry()) is None


def test_only_so_many_facts_are_kept() -> None:
    remembered = Remembered()
    first, *_, last = [remembered.put(found(), []) for _ in range(MAX_LOOKS + 1)]
    assert remembered.take(first, entry()) is None
    assert remembered.take(last, entry()) == found()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceSteps:
    """Of a daemon that has the rank."""
    monkeypatch.setattr("snapshotd.moves.peers.connections.look", lambda pids, places: ([], []))
    here: Any = SimpleNamespace(**vars(entry(cgroup=str(tmp_path))) | {"link": object()})
    here.group, here.keeper_alive = SimpleNamespace(pids=list), bool
    node: Any = SimpleNamespace(
        journal=Journal(tmp_path / "journal"),
        config=SimpleNamespace(node="node-1", advertise="node-1:7070"),
        ranks=SimpleNamespace(here=lambda uid: here, get=lambda uid, role: here),
    )
    anything: Any = SimpleNamespace()
    made = SourceSteps(node, lambda pids: "", anything)
    monkeypatch.setattr(made, "settle_all", lambda: None)
    return made


async def test_move_begins_with_what_its_own_preflight_found(
    source: SourceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other callers look at the same rank before and afterwards, and find something else, or are refused."""
    looks: list[Looked] = []

    async def look(*_: object, moves: bool) -> Looked:
        one = found()
        one.facts.threads = len(looks)
        looks.append(Looked(one.facts, [REFUSAL] if len(looks) == 2 else [], one.scope))
        return looks[-1]

    monkeypatch.setattr(inspection, "look", look)
    request = pb.InspectRequest(rank_uid=UID, protocol=protocol.own())
    _, mine, refused = [await source.inspect(request) for _ in range(3)]
    assert refused.look == ""
    begin = pb.BeginRequest(move="m-000000000001", rank_uid=UID, nonce=bytes(32), lease_s=30, look=mine.look)
    await source.begin(begin)
    assert source.moving(begin.move).facts == mine.facts == looks[1].facts
    source.node.ranks.here(UID).moving = ""
    begin.move = "m-000000000002"
    await source.begin(begin)
    assert source.moving(begin.move).facts == looks[3].facts, "what was used once is not used again"


async def test_move_does_not_begin_with_shared_memory_that_the_target_was_not_told_of(
    source: SourceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be too old to open it again."""

    async def look(*_: object, moves: bool) -> Looked:
        one = found()
        one.facts.protocol.CopyFrom(pb.Protocol(newest=protocol.NEWEST, oldest=protocol.SHARED_DEVICE_MEMORY))
        return one

    monkeypatch.setattr(inspection, "look", look)
    request = pb.InspectRequest(rank_uid=UID, protocol=protocol.own())
    begin = pb.BeginRequest(move="m-000000000001", rank_uid=UID, nonce=bytes(32), lease_s=30)
    with pytest.raises(Undone, match="the target was asked too long ago") as caught:
        await source.begin(begin)
    assert caught.value.where is Where.SOURCE_RUNNING
    source.node.ranks.here(UID).moving = ""
    begin.move, begin.look = "m-000000000002", (await source.inspect(request)).look
    await source.begin(begin)
