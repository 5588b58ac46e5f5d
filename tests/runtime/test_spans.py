"""Spans of a move: recorded in its calls, tasks and threads only, nested, and bounded."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from snapshotd.api.methods import methods
from snapshotd.api.servicers import spans_of
from snapshotd.network import dispatch
from snapshotd.runtime import spans
from snapshotd.runtime.blocking import in_thread


def a_move() -> str:
    return f"m-{secrets.token_hex(6)}"


def test_spans_nest_also_in_threads_and_tasks() -> None:
    move = a_move()

    def blocking() -> None:
        with spans.span("in a thread"):
            pass

    async def beside() -> None:
        with spans.span("in a task"):
            await asyncio.sleep(0)

    async def work() -> None:
        with spans.of_move(move, "Source.Freeze"):
            task = asyncio.create_task(beside())
            with spans.span("stop", 7) as stopping:
                await in_thread(blocking)
                stopping.bytes = 8
            spans.add("measured", 0.5, 9)
            await task

    asyncio.run(work())
    found = {span.name: span for span in spans_of(move).spans}
    names = list(found)
    parents = {name: names[span.parent - 1] if span.parent else "" for name, span in found.items()}
    assert parents == {
        "Source.Freeze": "",
        "stop": "Source.Freeze",
        "in a thread": "stop",
        "in a task": "Source.Freeze",
        "measured": "Source.Freeze",
    }
    assert found["Source.Freeze"].call
    assert not found["stop"].call
    assert (found["stop"].bytes, found["measured"].bytes) == (8, 9)
    assert found["measured"].seconds == pytest.approx(0.5)
    assert all(not span.unfinished and span.seconds >= 0 for span in found.values())


def test_what_a_task_does_after_the_call_that_began_it_is_no_part_of_that_call() -> None:
    """It keeps its own times: a trace would put it at the end of that call."""
    move = a_move()

    async def settle(ended: asyncio.Event) -> None:
        await ended.wait()
        with spans.span("thaw"), spans.span("socket options"):
            pass

    async def work() -> None:
        ended = asyncio.Event()
        with spans.of_move(move, "Target.Prepare"), spans.span("start"):
            task = asyncio.create_task(settle(ended))
        ended.set()
        await task

    asyncio.run(work())
    prepare, start, thaw, inside = spans_of(move).spans
    assert (prepare.parent, start.parent, thaw.parent, inside.parent) == (0, 1, 0, 3)
    assert thaw.began_s >= prepare.began_s + prepare.seconds


@pytest.mark.parametrize(
    ("call", "timed"),
    [
        ("Source/Freeze", True),
        ("Gate/Close", True),
        ("Source/Renew", False),
        ("Source/GetOutcome", False),
        ("Target/GetCopy", False),
        ("Gate/Report", False),
        ("Node/GetSpans", False),
    ],
)
def test_questions_about_a_move_do_not_fill_its_spans(call: str, timed: bool) -> None:
    """A source that waits for its target asks every second, and there is room for a number of spans only."""
    method = methods()[f"/snapshotd.v1.{call}"]
    assert dispatch._move_of(method.path, method.request(move="m-000000000001")) == ("m-000000000001" if timed else "")


def test_nothing_is_recorded_outside_of_a_move() -> None:
    before = dict(spans._moves)
    with spans.span("stop"), spans.of_move("", "Source.Inspect"):
        spans.add("measured", 1.0)
    assert spans._moves == before


def test_what_fails_or_has_not_ended_says_so() -> None:
    move = a_move()
    with pytest.raises(ZeroDivisionError), spans.of_move(move, "Source.Freeze"), spans.span("stop"):
        raise ZeroDivisionError
    with spans.of_move(move, "Source.Stream"):
        now = {span.name: span for span in spans_of(move).spans}
        assert now["Source.Stream"].unfinished
        assert now["Source.Freeze"].failed
        assert now["stop"].failed
    assert not any(span.unfinished for span in spans_of(move).spans)


def test_the_number_of_spans_and_moves_is_bounded() -> None:
    move = a_move()
    with spans.of_move(move, "Source.Freeze"):
        for _ in range(spans.MOST + 9):
            with spans.span("again"):
                pass
    reply = spans_of(move)
    assert (len(reply.spans), reply.left_out) == (spans.MOST, 10)
    for _ in range(spans.KEPT - 1):
        with spans.of_move(a_move(), "Source.Freeze"):
            pass
    with spans.of_move(move, "Source.Stream"):  # used again, so it is not the oldest
        pass
    with spans.of_move(a_move(), "Source.Freeze"):
        pass
    assert spans_of(move).spans
    assert len(spans._moves) == spans.KEPT


def test_a_move_that_is_not_known_has_no_spans() -> None:
    reply = spans_of(a_move())
    assert not reply.spans
    assert reply.now_s > 0
