"""Writes a trace in Chrome's trace event format, which chrome://tracing and Perfetto (ui.perfetto.dev) open.

There is a process row for the driver and for each node, with one or more threads. Spans of one thread follow or enclose each
other: those that overlap in time, because they were done at the same time, are put into threads beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from migrator.driver.timing import Timed
from migrator.driver.trace import Trace

Event = dict[str, Any]

DRIVER = 1
_FAR_S = 1e9


def document(trace: Trace) -> dict[str, Any]:
    """The content of the file. Times begin with 0, when the command began."""
    rows = _Rows(trace.began_s)
    rows.process(DRIVER, "driver (migrator move)")
    rows.threads(DRIVER, "pause", trace.pauses)
    rows.threads(DRIVER, "steps", trace.steps)
    calls = [
        Timed(call.method, call.began_s, call.ended_s, {"node": call.node} | ({"failed": True} if call.failed else {}))
        for call in trace.calls
    ]
    rows.threads(DRIVER, "calls", calls)
    pids: dict[str, int] = {}
    clocks: dict[str, float] = {}
    spans: dict[str, list[Timed]] = {}
    for found in trace.nodes:
        pid = pids.setdefault(found.node, DRIVER + 1 + len(pids))
        rows.process(pid, f"{found.node} ({', '.join(found.roles)})")
        clocks[found.node] = round(found.clock()[1] * 1e3, 3)
        spans.setdefault(found.node, []).extend(found.placed())
        if found.reply.left_out:
            trace.missing[found.node] = f"{found.reply.left_out} spans were left out"
    for node, placed in spans.items():
        rows.threads(pids[node], "steps", placed)
    return {
        "traceEvents": rows.events,
        "displayTimeUnit": "ms",
        "otherData": {**trace.about, "clock_uncertainty_ms": clocks, "missing": trace.missing},
    }


class _Rows:
    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.events: list[Event] = []
        self._threads: dict[int, int] = {}  # by process

    def process(self, pid: int, name: str) -> None:
        """Names a process; the last name counts."""
        self._name("process_name", pid, 0, {"name": name})
        self._name("process_sort_index", pid, 0, {"sort_index": pid})

    def threads(self, pid: int, name: str, spans: Iterable[Timed]) -> None:
        for number, lane in enumerate(lanes(spans)):
            tid = self._threads[pid] = self._threads.get(pid, 0) + 1
            self._name("thread_name", pid, tid, {"name": name if number == 0 else f"{name}, at the same time"})
            self._name("thread_sort_index", pid, tid, {"sort_index": tid})
            for span in lane:
                self.events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": name,
                        "pid": pid,
                        "tid": tid,
                        "ts": self._us(span.began_s),
                        "dur": round(self._us(span.ended_s) - self._us(span.began_s), 3),
                        "args": span.args,
                    }
                )

    def _name(self, what: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    def _us(self, at_s: float) -> float:
        """A node may answer with any number: one that is not of this century is cut off."""
        return round(max(-_FAR_S, min(at_s - self.began_s, _FAR_S)) * 1e6, 3)


def lanes(spans: Iterable[Timed]) -> list[list[Timed]]:
    """The spans that have ended, in as many lists as needed so that those of one list follow or enclose each other. A span is
    with the one that it is a part of, if it does not overlap with another one there."""
    made: list[list[Timed]] = []
    open_ends: list[list[Timed]] = []  # of each lane: the spans that the next one may be inside of, outermost first
    place: dict[int, int] = {}
    for span in sorted((one for one in spans if one.ended_s), key=lambda one: (one.began_s, -one.ended_s)):
        preferred = place.get(id(span.parent), 0) if span.parent is not None else 0
        order = [preferred, *(number for number in range(len(made)) if number != preferred)]
        for number in order if made else ():
            if _fits(span, open_ends[number]):
                break
        else:
            number = len(made)
            made.append([])
            open_ends.append([])
        made[number].append(span)
        open_ends[number].append(span)
        place[id(span)] = number
    return made


def _fits(span: Timed, around: list[Timed]) -> bool:
    """Whether the span follows those in `around`, or is a part of the innermost. Removes those that have ended."""
    while around and around[-1].ended_s <= span.began_s:
        around.pop()
    return not around or (span.parent is around[-1] and span.ended_s <= around[-1].ended_s)
