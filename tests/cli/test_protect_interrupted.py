"""What `migrator protect` does when nodes are booted, and when the job is suspended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from migrator.find_rank import Found
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, RankPlace
from migrator.jobs import protect
from migrator.jobs.protect import Protection
from tests.cli.found_ranks import SUSPENDED, rank


class Booted(Protection):
    """A job of two ranks. When it is rolled back the node of one of them is booted before anyone has seen the rank there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, boots: dict[str, str], *, stands_by: bool = False) -> None:
        nothing: Any = None
        self.said: list[str] = []
        super().__init__(nothing, JobOptions("job"), 60.0, 3, self.said.append, stands_by=stands_by, first_s=1e9)
        self.ranks, self.boots_now, self.recalled, self.looks = [rank(0, "a"), rank(1, "b")], boots, True, 0
        monkeypatch.setattr(protect, "LOOK_S", 0.001)
        monkeypatch.setattr("migrator.jobs.rollback", self._rolled_back)
        for records in ("all_rollbacks", "all_jobs"):
            monkeypatch.setattr(protect, records, self._no_records)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        self.looks += 1
        return self.ranks, {}

    async def _boots(self) -> dict[str, str]:
        return dict(self.boots_now)

    async def _rolled_back(self, *_: object) -> JobResult:
        places = [RankPlace(0, "job-0", "a"), RankPlace(1, "job-1", "b")]
        if len([one for one in self.said if "rolling the job back" in one]) == 1:
            self.boots_now["b"] = "2"
            self.ranks = [rank(0, "a")]
        else:
            self.ranks = [rank(0, "a"), rank(1, "b")]
        return JobResult("m-1", "job", 0, "a", JobVerdict.ROLLED_BACK, places, 1.0)

    @staticmethod
    async def _no_records(_: object) -> tuple[list[Any], dict[str, Any]]:
        return [], {}

    async def until_said(self, text: str) -> None:
        running = asyncio.create_task(self.run())
        async with asyncio.timeout(30):
            while not running.done() and not any(text in one for one in self.said):  # noqa: ASYNC110 - what is tested looks by itself
                await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert any(text in one for one in self.said), self.said


async def test_node_that_is_booted_at_the_end_of_a_rollback_has_the_job_rolled_back_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protection = Booted(monkeypatch, {"a": "1", "b": "1"})
    protection.ranks = [rank(0, "a"), rank(1, "b", failed=9)]
    await protection.until_said("b was booted, and rank 1 has ended with it: rolling the job back")


async def test_protection_that_stands_by_takes_over_when_the_first_node_was_booted_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protection = Booted(monkeypatch, {"a": "1", "b": "1"}, stands_by=True)
    watched = asyncio.create_task(protection.until_said("a was booted, and rank 0 has ended with it: rolling the job"))
    while protection.looks < 2:  # noqa: ASYNC110 - what is tested looks by itself
        await asyncio.sleep(0.001)
    protection.ranks, protection.boots_now["a"] = [rank(1, "b")], "2"
    await watched
    assert "a, where the job was protected from, was booted: taking over" in protection.said


class Interrupted(Protection):
    """A job that is suspended while it is protected. `looks`: what nodes know of it, one after the other; the last one lasts.
    `did`: what was said and done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: list[tuple[list[Found], dict[str, object]]]) -> None:
        nothing: Any = None
        self.did: list[str] = []
        super().__init__(nothing, JobOptions("job"), 0.0, 3, self.did.append)
        self._looks, self.recalled = looks, True
        monkeypatch.setattr(protect, "LOOK_S", 0.0)

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    async def _boots(self) -> dict[str, str]:
        return {}

    async def _take_unless_lost(self) -> float | None:
        self.did.append("snapshot")
        return 1.0

    async def _roll_back(self, trouble: str) -> None:
        self.did.append(f"rollback: {trouble}")


async def test_protection_says_that_the_job_is_suspended_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [rank(0, "a"), rank(1, "b")]
    suspended = [rank(0, "a", SUSPENDED), rank(1, "b", SUSPENDED)]
    silent: dict[str, object] = {"a": "silent", "b": "silent"}
    looks = [
        (running, {}),
        *[(suspended, {})] * 3,
        ([], silent),
        (suspended, {}),
        (running, {}),
        (running, {}),
        ([], {}),
    ]
    protection = Interrupted(monkeypatch, looks)
    assert await protection.run() == 0
    waits = "the job is suspended: it is protected again when it is resumed (`migrator job resume job`)"
    resumed = "the job was resumed, and is protected again from its next snapshot on"
    assert protection.did == ["snapshot", waits, resumed, "snapshot", "snapshot", "the job has ended"]


async def test_job_that_fails_after_its_resumption_is_trouble_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [rank(0, "a"), rank(1, "b", failed=9)]
    protection = Interrupted(monkeypatch, [([rank(0, "a", SUSPENDED)], {}), (failed, {}), ([], {})])
    assert await protection.run() == 0
    assert protection.did[1:] == ["rollback: rank 1 on b failed (killed by signal 9)", "the job has ended"]
