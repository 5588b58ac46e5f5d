"""A rank of which a snapshot is taken goes on at once, but does not move until it is bound to the snapshot's coordinator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import WrongState
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source import suspended
from snapshotd.moves.source.departure import Departure
from snapshotd.proc import host

UID, MOVE, RECORD = "train-0-12345678", "m-000000000001", "m-ba9876543210"


class Place:
    """The node of a rank, and the move of its snapshot, whose image is complete."""

    def __init__(self, folder: Path) -> None:
        self.ranks, journal = Ranks(folder), Journal(folder)
        cgroup = str(folder / "no-cgroup")
        self.entry = RankEntry(UID, "train", 0, "home", 1, 1, cgroup, "b", "b:1", "key", host.boot_id(), 7)
        self.ranks.put(self.entry)
        names = (MOVE, "source", UID, "train", 0, "b", "b:1", "b", "b:1", "00" * 32, host.boot_id(), 1.0)
        self.log = journal.begin(
            Begin(*names, coordinator=RECORD, coordinator_node="a", coordinator_endpoint="a:1", kind="snapshot")
        )
        self.log.mark(Mark.STREAMED, cgroup=cgroup, keeper_role="home")
        self.entry.moving = MOVE
        node: Any = SimpleNamespace(ranks=self.ranks, journal=journal, config=SimpleNamespace(node="b"))
        nothing: Any = None
        self.departure = Departure(node, nothing)


async def test_rank_does_not_move_until_its_snapshot_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)

    async def let_run(_moving: Moving) -> None:
        pass

    monkeypatch.setattr(place.departure, "_let_run", let_run)
    moving = Moving(place.log)
    await place.departure.go_on(moving)
    assert place.log.known.continued
    assert place.entry.moving == MOVE
    place.log.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
    await place.departure.keep(moving)
    assert (place.entry.moving, place.entry.coordinator_node, place.entry.tethered) == ("", "a", True)
    stored = Ranks(tmp_path).get(UID, "home")
    assert stored is not None
    assert stored.coordinator_node == "a"


async def test_daemon_that_was_restarted_lets_the_rank_move_when_its_snapshot_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.log.mark(Mark.STREAMED, continued=True)
    place.log.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
    await place.departure.keep(Moving(place.log))  # the start of the daemon has set `moving` again
    assert place.entry.moving == ""


def test_protected_rank_has_one_coordinator(tmp_path: Path) -> None:
    place = Place(tmp_path)
    suspended.must_be_bound_to(place.entry, "c")
    place.entry.coordinator_node = "a"
    suspended.must_be_bound_to(place.entry, "c")  # of a job that was resumed, and has no snapshot since
    place.entry.tethered = True
    suspended.must_be_bound_to(place.entry, "a")
    with pytest.raises(WrongState, match="coordinated by a, not by c"):
        suspended.must_be_bound_to(place.entry, "c")


def test_move_from_the_coordinator_of_a_job_warns(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert suspended.coordinator_checks(place.entry, "b") == []
    place.entry.coordinator_node, place.entry.tethered = "b", True
    assert [one.verdict for one in suspended.coordinator_checks(place.entry, "b")] == [pb.Check.WARN]
    assert suspended.coordinator_checks(place.entry, "c") == []
