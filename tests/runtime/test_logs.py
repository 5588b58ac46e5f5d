"""Every record of a move carries its id, rank and phase, in both formats."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from snapshotd.runtime import logs
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.logs import move_context

LOG = logging.getLogger("snapshotd.moves")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Restores the root logger afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_text_format(stream: io.StringIO) -> None:
    logs.set_up("text", "info", stream)
    with move_context(move="m-0123456789ab", rank=3):
        with move_context(phase="freeze"):
            LOG.info("stopped %d processes", 4)
        LOG.warning("between phases")
    LOG.info("outside")
    LOG.debug("not shown")
    first, second, third = stream.getvalue().splitlines()
    stamp, rest = first.split(" ", 1)
    assert stamp.endswith("Z")
    assert stamp.count(":") == 2
    assert rest.split() == ["INFO", "moves", "m-0123456789ab", "rank", "3", "freeze:", "stopped", "4", "processes"]
    assert second.endswith("m-0123456789ab rank 3: between phases")
    assert third.split()[1:] == ["INFO", "moves", "outside"]


def test_json_format(stream: io.StringIO) -> None:
    logs.set_up("json", "debug", stream)
    with move_context(move="m-0123456789ab", rank="job-3-00c0ffee", phase="stream"):
        try:
            raise ValueError("broken")
        except ValueError:
            LOG.exception("it\nfailed")
    LOG.debug("outside")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["move"] == "m-0123456789ab"
    assert first["rank"] == "job-3-00c0ffee"
    assert first["phase"] == "stream"
    assert first["level"] == "error"
    assert first["message"] == "it\nfailed"
    assert "ValueError: broken" in first["traceback"]
    assert second.keys() == {"time", "level", "logger", "message"}


async def test_tasks_and_threads_of_a_move_carry_its_fields(stream: io.StringIO) -> None:
    logs.set_up("text", "info", stream)

    async def task(name: str) -> None:
        with move_context(move=name, phase="dump"):
            LOG.info("before")
            await asyncio.sleep(0)
            await in_thread(LOG.info, "in a thread")
            await all_at_once(LOG.info, ["at once"])
            await asyncio.create_task(child())

    async def child() -> None:
        LOG.info("in a task")

    await asyncio.gather(task("m-a"), task("m-b"))
    lines = stream.getvalue().splitlines()
    for move in ("m-a", "m-b"):
        own = [line.split(f"{move} ")[1] for line in lines if f" {move} " in line]
        assert own == ["dump: before", "dump: in a thread", "dump: at once", "dump: in a task"]
    assert logs.move_fields() == {}


def test_logged_text_cannot_imitate_a_record(stream: io.StringIO) -> None:
    logs.set_up("text", "info", stream)
    LOG.info("rank %s", "x\n2026-01-01T00:00:00.000Z ERROR   moves forged\r\x1b[2J")
    first, second = stream.getvalue().splitlines()
    assert second.startswith("    2026-01-01")
    assert second.endswith("forged\\r\\x1b[2J")
    assert "forged" not in first
