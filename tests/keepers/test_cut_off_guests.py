"""The launcher of a rank that its node has ended by itself is told why, unless the rank has come back meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, Unreachable
from snapshotd.keepers import relay, relay_keys
from snapshotd.keepers.adoption import Adoption
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.keepers.relay import Relays
from snapshotd.moves.jobs.ending import Endings
from snapshotd.proc import host

UID = "train-0-12345678"


class Home:
    """The home node, and the node that has the rank."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.cut = 0  # so many calls get no answer
        self.ranks = Ranks(folder / "home")
        self.entry = self._entry("home", folder)
        self.entry.away_node = "node-2"
        self.entry.link = SimpleNamespace(say=self._say)  # type: ignore[assignment]
        self.ranks.put(self.entry)
        self.relays = Relays(self._node("node-1", self.ranks))
        self.guests = Ranks(folder / "guests")
        self.guest = self._entry("guest", folder)
        relay_keys.take_over(self.guest, relay_keys.to_hand_over(self.entry))
        self.guest.tethered, self.guest.coordinator_node = True, "node-9"
        self.guests.put(self.guest)
        node = self._node("node-2", self.guests)
        nothing: Any = SimpleNamespace(moves={}, withdraw=lambda entry: None)
        self.adoption = Adoption(node, nothing, nothing, Relays(node), nothing)
        node.lost = self.adoption.lost
        self.endings = Endings(node)

    def _node(self, name: str, ranks: Ranks) -> Any:
        journal = SimpleNamespace(find=lambda move: None)
        return SimpleNamespace(config=SimpleNamespace(node=name), ranks=ranks, journal=journal, client=self._client)

    def _entry(self, role: str, folder: Path) -> RankEntry:
        names = (UID, "train", 0, role, 0, 0, str(folder / "none"), "node-1", "e", "ab" * 16, host.boot_id(), 7)
        return RankEntry(*names)

    async def _say(self, text: str) -> None:
        self.said.append(text)

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def say(request: pb.SayRequest, timeout_s: float) -> pb.SayReply:
            self.cut -= 1
            if self.cut >= 0:
                raise Unreachable("no answer")
            return await self.relays.said(request, "node-2")

        yield SimpleNamespace(home=SimpleNamespace(Say=say))

    async def end(self) -> None:
        await self.endings.cut_off([self.guest], "node-9 has been silent for 16 s")
        await asyncio.gather(*self.adoption._reports)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr("snapshotd.proc.cgroup.Cgroup.kill", lambda self, deadline_s: None)
    monkeypatch.setattr(relay, "_FIRST_WAIT_S", 0.001)
    return Home(tmp_path)


async def test_launcher_on_another_node_is_told_why_its_rank_was_ended(home: Home) -> None:
    home.cut = 3
    await home.end()
    assert len(home.said) == 1
    assert "rank 0 was ended on node-2: node-9 has been silent for 16 s" in home.said[0]
    assert home.guests.all() == [], "nothing is left of it here"
    assert home.entry.away_node == "node-2", "its keeper waits for it"


async def test_launcher_is_not_told_about_a_copy_that_the_job_has_left_behind(home: Home) -> None:
    home.entry.ended_by = "m-0000000000aa"
    await home.end()
    assert home.said == []


async def test_node_without_the_key_of_a_rank_tells_its_launcher_nothing(home: Home) -> None:
    home.guest.own_key, home.guest.former_keys = "cd" * 16, []
    with pytest.raises(Denied):
        await home.relays.said(pb.SayRequest(presented=relay_keys.presented(home.guest), text="x"), "node-3")
    assert home.said == []
