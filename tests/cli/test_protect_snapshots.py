"""When `migrator protect` takes a snapshot, puts it off or gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from migrator.cli import protect as cli
from migrator.find_rank import Found
from migrator.jobs import protect
from migrator.jobs.interval import best
from migrator.jobs.postponing import BELIEVED_S, MEASURED, Postponing
from migrator.jobs.protect import Protection
from snapshotd.api import snapshotd_pb2 as pb
from tests.cli.conftest import Migrator
from tests.cli.fake_daemon import FakeCluster
from tests.cli.found_ranks import rank


def test_interval_is_computed_from_the_pause_and_announced_when_it_changes() -> None:
    said: list[str] = []
    nothing: Any = None
    protection = Protection(nothing, nothing, None, 3, said.append, node_mtbf_s=1000 * 3600.0)
    ranks = [rank(0, "a"), rank(1, "b"), rank(1, "home", pb.Rank.AWAY)]
    for pause_s in (1.0, 1.1, 4.0):
        assert protection._until_next(ranks, pause_s) == best(pause_s, 2, 1000 * 3600.0).every_s
    assert len(said) == 2
    assert said[0].startswith("a snapshot every 1")
    assert "every 500.0 h on average" in said[0]
    assert Protection(nothing, nothing, 60.0, 3, said.append)._until_next(ranks, 1.0) == 60.0


def test_reason_why_there_is_no_snapshot_is_said_once() -> None:
    said: list[str] = []
    nothing: Any = None
    protection = Protection(nothing, nothing, 60.0, 3, said.append)
    for why in ("off", "off", "full", "off"):
        protection._no_snapshot(why)
    assert said == [f"no snapshot was taken: {why}" for why in ("off", "full", "off")]


class Scene(Protection):
    """A job of two ranks, of which a snapshot is taken that waits, and whose undo waits too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, 60.0, 3, lambda text: None)
        self.taken, self.undone = asyncio.Event(), asyncio.Event()
        self.ranks, self.silent, self.looks = [rank(0, "a"), rank(1, "b")], dict[str, object](), 0
        monkeypatch.setattr(protect, "LOOK_S", 0.001)
        monkeypatch.setattr(protect, "UNDO_S", 0.001)
        monkeypatch.setattr(protect, "BUSY_LOST_S", 1e9)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        self.looks += 1
        return self.ranks, self.silent

    async def _take(self) -> float | None:
        try:
            await self.taken.wait()
        except asyncio.CancelledError:
            await self.undone.wait()
            return None
        return 1.5

    async def seen(self, times: int) -> None:
        """Waits until it has looked so many times more."""
        until = self.looks + times
        while self.looks < until:  # noqa: ASYNC110 - what is tested looks by itself
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("loss", ["a rank fails", "a node is silent"])
async def test_snapshot_is_given_up_when_the_job_must_be_rolled_back(
    monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Its undo may wait for the lost node: that does not keep the job from being rolled back."""
    scene = Scene(monkeypatch)
    taking = asyncio.create_task(scene._take_unless_lost())
    await scene.seen(2)
    if loss == "a rank fails":
        scene.ranks = [rank(0, "a"), rank(1, "b", failed=9)]
    else:
        scene.ranks, scene.silent = [rank(0, "a")], {"b": "silent"}
        await scene.seen(3)
        assert not taking.done(), "not yet: all nodes are busy with the snapshot"
        monkeypatch.setattr(protect, "BUSY_LOST_S", 0.0)
    assert await taking is None
    (left,) = scene._undoing
    scene.undone.set()
    assert await left is None


async def test_snapshot_of_a_job_that_is_well_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    taking = asyncio.create_task(scene._take_unless_lost())
    await scene.seen(3)
    scene.taken.set()
    assert await taking == 1.5


async def test_snapshot_waits_while_the_file_of_the_job_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene, file, said = Scene(monkeypatch), tmp_path / "evaluating", list[str]()
    scene.postponing, scene.say = Postponing(file), said.append
    scene.taken.set()
    file.touch()
    assert await scene._take_or_postpone(scene.ranks) is None
    assert await scene._take_or_postpone(scene.ranks) is None
    assert said == [f"no snapshot was taken: {file} exists"]
    file.unlink()
    assert await scene._take_or_postpone(scene.ranks) == 1.5


async def test_snapshot_that_would_pause_the_job_for_too_long_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, said, now_s = Scene(monkeypatch), list[str](), [0.0]
    scene.postponing, scene.say = Postponing(max_pause_s=2.0, clock=lambda: now_s[0]), said.append
    scene.taken.set()

    async def taken(largest_bytes: int) -> bool:
        scene.ranks[1].rank.memory_bytes, scene.ranks[1].rank.device_bytes = 100, largest_bytes - 100
        return await scene._take_or_postpone(scene.ranks) == 1.5

    assert await taken(150), "the first one, and its pause is measured"
    assert await taken(200), "2 s are expected"
    assert not await taken(300), "1.5 s were measured with 200 bytes"
    assert not await taken(290)
    (only,) = said
    assert only.startswith(
        "no snapshot was taken: it would pause the job for longer than 2 s (--max-pause); the one before"
    )
    assert await taken(100)
    now_s[0] = BELIEVED_S + 1
    assert await taken(300), "what was measured is not believed for ever"


def test_one_long_pause_among_others_puts_nothing_off() -> None:
    postponing, ranks = Postponing(max_pause_s=2.0), [rank(0, "a")]
    ranks[0].rank.memory_bytes = 100
    for pause_s in (1.0, 9.0):
        postponing.measured(pause_s, ranks)
        assert not postponing.why(ranks)
    for _ in range(MEASURED):
        postponing.measured(9.0, ranks)
    assert postponing.why(ranks)


def test_options_of_the_protection_have_defaults_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, migrator: Migrator, cluster: FakeCluster
) -> None:
    found: list[Postponing] = []

    class Seen(Protection):
        async def run(self) -> int:
            found.append(self.postponing)
            return 0

    monkeypatch.setattr(protect, "Protection", Seen)
    assert migrator("protect", "night").code == 0
    monkeypatch.setenv(cli.MAX_PAUSE, "")
    monkeypatch.setenv(cli.UNLESS_FILE, "")
    assert migrator("protect", "night").code == 0
    monkeypatch.setenv(cli.MAX_PAUSE, "2.5")
    monkeypatch.setenv(cli.UNLESS_FILE, "/shared/evaluating")
    assert migrator("protect", "night").code == 0
    assert migrator("protect", "night", "--max-pause", "1").code == 0
    shared = Path("/shared/evaluating")
    assert found == [Postponing(), Postponing(), Postponing(shared, 2.5), Postponing(shared, 1.0)]
    monkeypatch.setenv(cli.MAX_PAUSE, "soon")
    assert migrator("protect", "night").code == 2
    assert len(found) == 4
