"""How long something must persist before it is an alarm. Pure: readings come with their time.

Three kinds: an event (`Counters.increase` is not zero), a rate (`Rate`), and N of M readings (`Recent`).
"""

from __future__ import annotations

from collections import deque

HOUR_S = 3600.0


class Counters:
    """How much counters have grown since they were last read, also by an earlier daemon: errors that were counted while no
    daemon ran are noticed, and errors that an operator has cleared do not come back with a restart."""

    def __init__(self, values: dict[str, int] | None = None) -> None:
        self.values = dict(values or {})

    def increase(self, key: str, value: int, *, first: int | None = None) -> int:
        """The increase. `first`: what a counter that was never read began with; None: its value, so that the errors of a
        machine's whole life are not an alarm. A counter that is smaller than before began again at 0."""
        before = self.values.get(key, value if first is None else first)
        self.values[key] = value
        return value - before if value >= before else value


class Rate:
    """Increases within the last `window_s` seconds."""

    def __init__(self, limit: float, window_s: float = HOUR_S) -> None:
        self.limit, self.window_s = limit, window_s
        self._increases: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, increase: int) -> int:
        """The sum, if it has just reached the limit or grown beyond it; otherwise 0. `now_s` is monotonic."""
        while self._increases and self._increases[0][0] <= now_s - self.window_s:
            self._increases.popleft()
        if increase:
            self._increases.append((now_s, increase))
        total = sum(each for _, each in self._increases)
        return total if increase and total >= self.limit else 0


class Recent:
    """Whether at least `needed` of the last `of` readings were bad."""

    def __init__(self, needed: float, of: int) -> None:
        self.needed = min(needed, of)
        self._readings: deque[bool] = deque(maxlen=of)

    def add(self, bad: bool) -> bool:
        """True only for a bad reading: a cause that has gone is not seen again."""
        self._readings.append(bad)
        return bad and sum(self._readings) >= self.needed
