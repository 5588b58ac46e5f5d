"""The program that examines a repaired node."""

from __future__ import annotations

import asyncio
from pathlib import Path

from migrator.autopilot import validation
from tests.autopilot.test_engine import until


async def test_program_ends_with_the_task_that_waits_for_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f'echo $$ >"{file}.new"; mv "{file}.new" "{file}"; exec sleep 600'
    task = asyncio.create_task(validation._run(["/bin/sh", "-c", script], 600.0))

    async def runs() -> bool:
        return file.exists()

    await until("the program", runs)
    place = Path("/proc") / file.read_text().strip()
    assert place.exists()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not place.exists()
