"""Limits how fast copies of snapshots leave this node: the job runs meanwhile, and its own traffic goes first.

A token bucket as a schedule: whatever is sent occupies the line for as long as the limit says, one after the other, and
waits until the line is free. All copies that leave at the same time share it. Time in which nothing was sent is not saved up,
except for `BURST_S`, so that a sender which is woken late makes up for it.

Invariant: from any moment on, at most `bytes_per_s` × (seconds + BURST_S) are let through, and one chunk more. A copy whose
limit is lifted waits for nothing, and does not count for the others.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BURST_S = 0.1

_LIMIT = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kMGT]?B/s)", re.ASCII)
_UNITS = {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
#: Less than this is not a limit but a mistake: a snapshot would take longer than its driver waits.
LEAST_BYTES_PER_S = 10**6


@dataclass(frozen=True)
class Limit:
    """As the configuration says it: one of the two is set."""

    bytes_per_s: float = 0.0
    percent: float = 0.0  # of the link's speed

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Raises ValueError."""
        found = _LIMIT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:40]!r} is neither a speed nor a percentage")
        number, unit = float(found[1]), found[2]
        if unit == "%":
            if not 0 < number <= 100:
                raise ValueError(f"{text} is not between 0 % and 100 %")
            return cls(percent=number)
        if number * _UNITS[unit] < LEAST_BYTES_PER_S:
            raise ValueError(f"{text} is less than 1 MB/s")
        return cls(bytes_per_s=number * _UNITS[unit])

    def of_link(self, link_bytes_per_s: float) -> float:
        """In bytes per second; 0: no limit, because the speed of the link is not known."""
        return self.bytes_per_s or max(
            self.percent / 100 * link_bytes_per_s, LEAST_BYTES_PER_S if link_bytes_per_s else 0
        )


class Bucket:
    """What one link lets through. Used on one loop. `clock` and `sleep`: for tests."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_s = float("-inf")  # when the line is free

    async def take(self, count_bytes: int, lifted: asyncio.Event) -> float:
        """Waits until so many bytes may be sent; for how long. Neither waits nor counts if the limit is lifted for them."""
        if lifted.is_set():
            return 0.0
        now_s = self._clock()
        starts_s = max(self._free_s, now_s - BURST_S)
        self._free_s = starts_s + count_bytes / self.bytes_per_s
        if starts_s <= now_s:
            return 0.0
        await self._or_lifted(starts_s - now_s, lifted)
        return self._clock() - now_s

    async def _or_lifted(self, seconds: float, lifted: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(lifted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
