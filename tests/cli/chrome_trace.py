"""Reads a trace as chrome://tracing does, and checks what such a program relies on."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Times are rounded to nanoseconds.
ROUNDED_US = 0.01


@dataclass
class Shown:
    """A span with those that are drawn below it."""

    name: str
    row: str  # name of its process
    thread: str
    began_us: float
    ended_us: float
    args: dict[str, Any]
    below: list[Shown] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.ended_us - self.began_us) / 1e6


@dataclass
class Chart:
    spans: list[Shown]
    about: dict[str, Any]

    def rows(self) -> set[str]:
        return {span.row for span in self.spans}

    def named(self, name: str, row: str = "") -> list[Shown]:
        return [span for span in self.spans if span.name == name and row in span.row]

    def one(self, name: str, row: str = "") -> Shown:
        (found,) = self.named(name, row)
        return found


def read(path: Path) -> Chart:
    """Asserts that the file is valid, and that the spans of each thread follow or enclose each other."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    lanes: dict[tuple[int, int], list[Shown]] = defaultdict(list)
    for event in content["traceEvents"]:
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                threads[where] = event["args"]["name"]
            continue
        assert event["ph"] == "X", event
        assert event["dur"] >= 0, event
        ends = event["ts"] + event["dur"]
        row, thread = processes[event["pid"]], threads[where]
        lanes[where].append(Shown(event["name"], row, thread, event["ts"], ends, event["args"]))
    for lane in lanes.values():
        around: list[Shown] = []
        for span in sorted(lane, key=lambda one: (one.began_us, -one.ended_us)):
            while around and around[-1].ended_us <= span.began_us + ROUNDED_US:
                around.pop()
            if around:
                assert span.ended_us <= around[-1].ended_us + ROUNDED_US, f"{span.name} overlaps {around[-1].name}"
                around[-1].below.append(span)
            around.append(span)
    return Chart([span for lane in lanes.values() for span in lane], content["otherData"])
