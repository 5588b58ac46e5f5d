"""Measures the parts of a step, and does the same for several processes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime import spans


class Parts:
    """Where the time of a step went."""

    def __init__(self) -> None:
        self.all: list[pb.Part] = []

    async def time(self, name: str, work: Awaitable[Any], bytes_: int = 0) -> Any:
        began = host.boottime_s()
        with spans.span(name, bytes_):
            result = await work
        self._add(name, host.boottime_s() - began, bytes_)
        return result

    def add(self, name: str, seconds: float, bytes_: int = 0) -> None:
        """Adds what has just ended to a part; repeated work counts as one part."""
        spans.add(name, seconds, bytes_)
        self._add(name, seconds, bytes_)

    def _add(self, name: str, seconds: float, bytes_: int) -> None:
        known = next((part for part in self.all if part.name == name), None)
        if known is None:
            self.all.append(pb.Part(name=name, seconds=seconds, bytes=bytes_))
        else:
            known.seconds += seconds
            known.bytes += bytes_


async def each(processes: Sequence[Process], act: Callable[[Process], Awaitable[Any]]) -> list[Any]:
    """Does the same for every process at once. Waits for all, then raises the first failure."""
    results = await asyncio.gather(*(act(process) for process in processes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
