"""A move that begins right after its preflight uses what that found, once, and only for the same process."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.closed_files import Scope
from snapshotd.moves.source.inspection import FRESH_S, Looked, Remembered
from snapshotd.proc import host

UID = "train-0-00000001"


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
    remembered.put(found())
    assert remembered.take(entry()) == found()
    assert remembered.take(entry()) is None


def test_facts_of_another_process_or_rank_are_not_used() -> None:
    remembered = Remembered()
    for other in (entry(start_ticks=100), entry(pid=4712), entry(uid="train-1-00000002")):
        remembered.put(found())
        assert remembered.take(other) is None
    assert Remembered().take(entry(pid=0, start_ticks=0)) is None


def test_old_facts_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(host, "boottime_s", lambda: now_s)
    remembered = Remembered()
    remembered.put(found())
    now_s += FRESH_S - 1
    assert remembered.take(entry()) is not None
    remembered.put(found())
    now_s += FRESH_S + 1
    assert remembered.take(entry()) is None
