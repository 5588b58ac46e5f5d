"""Copies of an incarnation that is over are ended, whatever they are about to do, and only if their coordinator asks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.jobs.ending import Endings
from snapshotd.proc import host

RECORD, OTHER = "m-0000000000aa", "m-0000000000bb"
UID = "train-0-12345678"


class Place:
    """A node with one rank, whose processes are only counted."""

    def __init__(self, folder: Path, role: str, incarnation: str, coordinator: str = "node-1") -> None:
        self.ranks = Ranks(folder)
        self.lost: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.entry = RankEntry(
            *(UID, "train", 0, role, 1, 1, str(folder / "no-cgroup"), "node-1", "e", "key", host.boot_id(), 7),
            incarnation=incarnation,
            coordinator_node=coordinator,
        )
        self.ranks.put(self.entry)
        config = SimpleNamespace(node="node-2")
        journal = SimpleNamespace(find=lambda move: None)
        node: Any = SimpleNamespace(config=config, ranks=self.ranks, journal=journal, lost=self._lost)
        self.endings = Endings(node)

    async def _lost(self, entry: RankEntry) -> None:
        self.lost.append(entry.uid)
        self.ranks.remove(entry)

    async def end(self, incarnation: str, caller: str = "node-1") -> list[str]:
        request = pb.EndRanksRequest(record=RECORD, incarnation=incarnation, rank_uids=[UID])
        return list((await self.endings.end(request, caller)).waiting_for)


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was killed, in order; nothing is."""
    done: list[str] = []
    monkeypatch.setattr("snapshotd.proc.tree.Process.signal", lambda self, number: done.append("keeper"))
    monkeypatch.setattr("snapshotd.proc.cgroup.Cgroup.kill", lambda self, deadline_s: done.append("rank"))
    return done


async def test_guest_of_that_incarnation_is_ended(tmp_path: Path, killed: list[str]) -> None:
    place = Place(tmp_path, "guest", RECORD)
    assert await place.end(RECORD) == []
    assert place.lost == [UID]
    assert killed == ["keeper", "rank"], "a keeper that lives would report the end of its rank to the launcher"
    assert await place.end(RECORD) == [], "idempotent"


async def test_copies_of_another_incarnation_or_another_coordinator_stay(tmp_path: Path) -> None:
    place = Place(tmp_path, "guest", RECORD)
    assert await place.end(OTHER) == []
    assert await place.end("") == []
    assert await place.end(RECORD, caller="node-3") == ["rank 0: its coordinator is node-1"], (
        "it runs, and is waited for"
    )
    assert place.lost == []


async def test_copy_that_is_not_bound_to_a_coordinator_yet_is_waited_for(tmp_path: Path) -> None:
    place = Place(tmp_path, "guest", RECORD, coordinator="")
    assert await place.end(RECORD) == ["rank 0: it has no coordinator: no snapshot of it is complete here"]
    assert place.lost == []


async def test_an_end_is_remembered_for_copies_that_arrive_later(tmp_path: Path) -> None:
    place = Place(tmp_path, "guest", OTHER)
    await place.end(RECORD)
    place.entry.incarnation = RECORD
    again = Ranks(tmp_path)  # a restarted daemon
    assert again.has_ended(place.entry)
    place.entry.coordinator_node = "node-3"
    assert not again.has_ended(place.entry)


async def test_restarted_daemon_continues(tmp_path: Path) -> None:
    place = Place(tmp_path, "guest", RECORD)
    place.ranks.end(UID, RECORD, "node-1")
    await place.endings.sweep()
    assert place.lost == [UID]


async def test_home_keeper_learns_that_its_rank_is_away_before_the_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[str]
) -> None:
    place = Place(tmp_path, "home", "")
    monkeypatch.setattr(RankEntry, "keeper_alive", lambda self: True)
    assert await place.end("") == ["rank 0: its keeper has not reconnected yet"]

    async def away(move: str, node: str) -> None:
        assert (place.entry.away_node, killed) == ("", [])
        place.told.append((move, node))

    place.entry.link = SimpleNamespace(away=away)  # type: ignore[assignment]
    assert await place.end("") == []
    assert place.told == [(RECORD, "node-2")]
    assert killed == ["rank"], "frozen before, and ended before it counts as away"
    assert place.ranks.get(UID, "home") is place.entry
    assert place.entry.away_node == "node-2"


@pytest.mark.parametrize("coordinator", ["", "node-1"])
async def test_home_entry_of_a_rank_elsewhere_is_changed_by_its_coordinator_alone(
    tmp_path: Path, coordinator: str
) -> None:
    """A node that has had the rank could come back with a key made from a record that it has made up."""
    place = Place(tmp_path, "home", "", coordinator)
    place.entry.away_node = "node-3"
    await place.end("", caller="node-4")
    assert place.entry.ended_by == ""
    await place.end("", caller="node-1")
    assert place.entry.ended_by == (RECORD if coordinator else "")


async def test_rank_whose_keeper_has_not_reconnected_does_not_run_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(RankEntry, "keeper_alive", lambda self: True)
    monkeypatch.setattr("snapshotd.proc.cgroup.Cgroup.pids", lambda self: [1])
    monkeypatch.setattr("snapshotd.proc.cgroup.Cgroup.freeze", lambda self, deadline_s: frozen.append("rank"))
    place = Place(tmp_path, "home", "")
    assert await place.end("") == ["rank 0: its keeper has not reconnected yet"]
    assert frozen == ["rank"]


async def test_daemon_that_crashed_before_it_killed_a_rank_kills_it_after_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[str]
) -> None:
    def crash(self: Any, deadline_s: float) -> None:
        raise OSError("the daemon is killed here")

    async def away(move: str, node: str) -> None:
        place.told.append((move, node))

    monkeypatch.setattr(RankEntry, "keeper_alive", lambda self: True)
    place = Place(tmp_path, "home", "")
    place.entry.link = SimpleNamespace(away=away)  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr("snapshotd.proc.cgroup.Cgroup.kill", crash)
        assert await place.end("") == ["rank 0: the daemon is killed here"]
    assert [one.uid for one in place.endings.ended_ones()] == [UID]
    await place.endings.sweep()
    assert killed == ["rank"]
    assert place.endings.ended_ones() == []


def test_end_that_cannot_be_read_stops_neither_the_daemon_nor_other_ranks(tmp_path: Path) -> None:
    place = Place(tmp_path, "guest", RECORD)
    place.ranks.end(UID, RECORD, "node-1")
    (tmp_path / "ranks" / f"{UID}.ended").write_text('[["m-0000')
    with pytest.raises(Damaged, match="cannot be read"):
        place.ranks.has_ended(place.entry)
    assert place.endings.ended_ones() == []
