"""How fast one user or one caller may give a process work: a token bucket for each. One that is too fast waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

_MAX_KEYS = 4096


class Pace:
    """Each key may use `cost_per_s` in the long run, and `burst_cost` at once."""

    def __init__(self, cost_per_s: float, burst_cost: float) -> None:
        self._cost_per_s, self._burst_s = cost_per_s, burst_cost / cost_per_s
        self._paid_until_s: dict[Hashable, float] = {}

    async def turn(self, key: Hashable, cost: float) -> None:
        """Counts `cost`, and returns when the key may go on."""
        if (wait_s := self.wait_s(key, cost, time.monotonic())) > 0:
            await asyncio.sleep(wait_s)

    def wait_s(self, key: Hashable, cost: float, now_s: float) -> float:
        """Counts `cost`, and returns how long the key has to wait before it goes on."""
        paid_until_s = max(self._paid_until_s.get(key, now_s), now_s) + cost / self._cost_per_s
        if key not in self._paid_until_s and len(self._paid_until_s) >= _MAX_KEYS:
            self._paid_until_s = {one: until for one, until in self._paid_until_s.items() if until > now_s}
        self._paid_until_s[key] = paid_until_s
        return max(0.0, paid_until_s - now_s - self._burst_s)
