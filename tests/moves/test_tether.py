"""A rank of a job with a snapshot ends when it is cut off from its coordinator for long, and as soon as its job was rolled
back; not if only the coordinator's daemon is down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreachable
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves import job_rules
from snapshotd.moves.jobs import tether
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.tether import Tether
from snapshotd.proc import host

UID = "train-0-12345678"


class Place:
    """A node with one tethered rank, and a coordinator that answers as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: pb.MayRunReply | None = pb.MayRunReply()  # None: it does not answer
        self.answer_error: OSError | None = None
        self.machine, self.now_s = False, 1000.0
        self.ended: list[str] = []
        self.ranks = Ranks(folder)
        self.entry = RankEntry(
            *(UID, "train", 0, "guest", 1, 1, str(folder / "no-cgroup"), "node-1", "e", "key", host.boot_id(), 7),
            coordinator_node="node-1",
            coordinator_endpoint="10.0.0.1:7070",
            tethered=True,
        )
        self.ranks.put(self.entry)
        node: Any = SimpleNamespace(config=SimpleNamespace(node="node-2"), ranks=self.ranks, client=self._client)
        endings = Endings(node)
        monkeypatch.setattr(endings, "try_to_end", self._end)
        monkeypatch.setattr(endings, "ended_ones", list)
        self.node, self.endings = node, endings
        self.tether = Tether(node, endings)
        monkeypatch.setattr(host, "boottime_s", lambda: self.now_s)
        monkeypatch.setattr(tether, "answers", self._machine)

    async def _machine(self, _endpoint: str, _limit_s: float) -> bool:
        return self.machine

    async def _end(self, entry: RankEntry, _why: str) -> None:
        self.ended.append(entry.uid)

    @asynccontextmanager
    async def _client(self, _name: str, _endpoint: str) -> AsyncIterator[Any]:
        async def may_run(request: pb.MayRunRequest, timeout_s: float) -> pb.MayRunReply:
            if self.answer_error is not None:
                raise self.answer_error
            if self.answer is None:
                raise Unreachable("no answer")
            return self.answer

        yield SimpleNamespace(job=SimpleNamespace(MayRun=may_run))

    async def after(self, seconds: float) -> list[str]:
        self.now_s += seconds
        await self.tether.look()
        return self.ended


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


async def test_rank_that_is_cut_off_for_long_ends(place: Place) -> None:
    await place.tether.look()
    place.answer = None
    assert await place.after(job_rules.CUT_OFF_S - 1) == []
    assert await place.after(2) == [UID]
    assert place.ranks.has_ended(place.entry), "on the disk, before it is ended"


async def test_contact_begins_anew_with_every_answer(place: Place) -> None:
    await place.tether.look()
    for answer in (None, pb.MayRunReply()) * 3:
        place.answer = answer
        assert await place.after(job_rules.CUT_OFF_S - 1) == []


async def test_a_coordinator_whose_daemon_is_down_decides_nothing(place: Place) -> None:
    place.answer, place.machine = None, True
    await place.tether.look()
    assert await place.after(10 * job_rules.CUT_OFF_S) == []


async def test_rank_of_a_job_that_was_rolled_back_ends_at_once(place: Place) -> None:
    place.answer = pb.MayRunReply(ended_by="m-0000000000aa")
    assert await place.after(0) == [UID]


async def test_ranks_without_a_snapshot_are_not_asked_about(place: Place) -> None:
    place.entry.tethered, place.answer = False, None
    await place.tether.look()
    assert await place.after(10 * job_rules.CUT_OFF_S) == []


async def test_daemon_that_is_restarted_while_it_is_cut_off_does_not_wait_anew(place: Place) -> None:
    await place.tether.look()
    place.answer = None
    assert await place.after(job_rules.CUT_OFF_S - 1) == []
    place.tether = Tether(place.node, place.endings)
    assert await place.after(2) == [UID]


async def test_rank_that_could_not_be_ended_is_ended_later_whatever_the_coordinator_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.ranks.end(UID, "", "node-1")
    monkeypatch.setattr(place.endings, "ended_ones", lambda: [place.entry])
    assert await place.after(0) == [UID]
    assert await place.after(0) == [UID, UID]


async def test_coordinator_that_cannot_be_asked_for_lack_of_descriptors_is_silent(place: Place) -> None:
    await place.tether.look()
    place.answer_error = OSError(24, "Too many open files")
    assert await place.after(job_rules.CUT_OFF_S + 1) == [UID]


async def test_launcher_is_told_why_its_rank_has_ended(place: Place) -> None:
    said: list[str] = []

    async def say(text: str) -> None:
        said.append(text)

    place.entry.role, place.entry.link = "home", SimpleNamespace(say=say)  # type: ignore[assignment]
    await place.tether.look()
    place.answer = None
    assert await place.after(job_rules.CUT_OFF_S + 1) == [UID]
    assert "node-1 has been silent for 16 s" in said[0]
    assert "migrator job rollback train" in said[0]
