"""What `migrator protect` passes on of the warnings of its snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from migrator import jobs
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult
from migrator.jobs.protect import Protection


async def test_warnings_of_a_snapshot_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nothing: Any = None
    protection = Protection(nothing, JobOptions("job"), 60.0, 3, said.append)
    found: list[list[str]] = [["node-3 is silent"], ["node-3 is silent"], [], ["node-3 is silent"]]

    async def boots(_: Protection) -> dict[str, str]:
        return {}

    async def snapshot(*_: Any) -> JobResult:
        return JobResult("m-1", "job", 7, "a", JobVerdict.SNAPSHOTTED, [], 1.0, warnings=found.pop(0))

    monkeypatch.setattr(Protection, "_boots", boots)
    monkeypatch.setattr(jobs, "snapshot", snapshot)
    for _ in range(4):
        await protection._take()
    warned = "warning: node-3 is silent"
    assert [one.partition(": 0 MiB")[0] for one in said] == [warned, *["snapshot m-1"] * 3, warned, "snapshot m-1"]
