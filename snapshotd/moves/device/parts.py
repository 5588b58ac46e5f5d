"""Measures the parts of a step, and does the same for several processes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.proc import host
from snapshotd.proc.tree import Process


class Parts:
    """Where the time of a step went."""

    def __init__(self) -> None:
        self.all: list[pb.Part] = []

    async def time(self, name: str, work: Awaitable[Any], bytes_: int = 0) -> Any:
        began = host.boottime_s()
        result = await work
        self.add(name, host.boottime_s() - began, bytes_)
        return result

    def add(self, name: str, seconds: float, bytes_: int = 0) -> None:
        """Adds to a part; repeated work counts as one part."""
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
