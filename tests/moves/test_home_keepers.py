"""The home keeper of a rank that was given up while suspended is told, also by a daemon that was restarted meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import description
from snapshotd.moves.jobs.home_keepers import FILE, HomeKeepers
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome

MOVE, KEY = "m-0123456789ab", "ab" * 16
#: Of an image, as far as it matters here.
META = {
    "root": 7,
    "command": "train.py",
    "started_unix_s": 1.5,
    "moves": 0,
    "user_id": 1000,
    "identity": {"user_id": 1000, "group_id": 100, "groups": []},
    "stopped_before": [],
    "affinity": {},
    "cpus": [0],
    "stdio": {"channels": [], "in": {"o": 0, "unread": "", "eof": True}, "signals": {"last": 0, "queued": []}},
    "other_names": {},
    "carried": [],
    "rewires": [],
    "nodes": [],
    "former": [],
    "sockets": {},
    "cuda": [],
    "device_bytes": 0,
    "nccl": [],
    "relay_key": "k",
    "relay_keys": [KEY],
    "home_node": "a",
    "home_endpoint": "a:1",
}


class Home:
    """The home node: it answers when the test says so."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.told: list[tuple[RankEntry, int]] = []

    async def report(self, entry: RankEntry, status: int) -> None:
        await self.answers.wait()
        self.told.append((entry, status))


@pytest.fixture
def home() -> Home:
    return Home()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / description.FILE).write_text(json.dumps(META))
    return folder


def suspended(folder: Path) -> MoveLog:
    begin = Begin(
        *(MOVE, "source", "night-1-01234567", "night", 1, "n", "e", "n", "e", "00" * 32, "boot", 1.0, 30.0, 7),
        coordinator="m-ba9876543210",
    )
    move_log = Journal(folder).begin(begin)
    move_log.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
    move_log.mark(Mark.SETTLED)
    return move_log


async def until_told(move_log: MoveLog) -> None:
    for _ in range(1200):
        if not (move_log.folder / FILE).exists():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the home keeper was not told")


async def test_keeper_is_told_with_the_keys_of_the_image(tmp_path: Path, images: Path, home: Home) -> None:
    move_log = suspended(tmp_path)
    keepers = HomeKeepers(Journal(tmp_path), home.report)
    keepers.remember(images, move_log)
    keepers.end(move_log)
    home.answers.set()
    await until_told(move_log)
    ((entry, status),) = home.told
    assert (entry.uid, entry.home_node, entry.home_endpoint, status) == ("night-1-01234567", "a", "a:1", 9)
    expects = RankEntry(**{**vars(entry), "holder_key": KEY, "role": "home"})
    assert relay_keys.check(expects, relay_keys.presented(entry)), "the home node accepts what this node presents"
    await keepers.stop()


async def test_keeper_whose_copies_were_ended_accepts_the_end(tmp_path: Path, images: Path, home: Home) -> None:
    move_log = suspended(tmp_path)
    keepers = HomeKeepers(Journal(tmp_path), home.report)
    keepers.remember(images, move_log, "m-0000000000aa m-0000000000bb")
    keepers.end(move_log)
    home.answers.set()
    await until_told(move_log)
    ((entry, _),) = home.told
    for ended_by in ("m-0000000000aa", "m-0000000000bb"):
        expects = RankEntry(**{**vars(entry), "relay_key": "k", "ended_by": ended_by, "role": "home"})
        assert relay_keys.check(expects, relay_keys.presented(entry))
    await keepers.stop()


async def test_restarted_daemon_tells_the_keeper(tmp_path: Path, images: Path, home: Home) -> None:
    move_log = suspended(tmp_path)
    first = HomeKeepers(Journal(tmp_path), home.report)
    first.remember(images, move_log)
    first.end(move_log)
    await first.stop()
    assert (move_log.folder / FILE).exists()
    again = HomeKeepers(Journal(tmp_path), home.report)
    again.adopt()
    home.answers.set()
    await until_told(move_log)
    assert len(home.told) == 1
    await again.stop()
    third = HomeKeepers(Journal(tmp_path), home.report)
    third.adopt()
    await third.stop()
    assert len(home.told) == 1, "told once"


async def test_image_that_cannot_be_read_is_dropped_all_the_same(tmp_path: Path, images: Path, home: Home) -> None:
    move_log = suspended(tmp_path)
    (images / description.FILE).write_text("{}")
    keepers = HomeKeepers(Journal(tmp_path), home.report)
    keepers.remember(images, move_log)
    assert not (move_log.folder / FILE).exists()
