"""How long a number has stayed the same, and how long it usually does. Pure."""

from __future__ import annotations


class Unchanged:
    """One rank's measure of progress. Every change counts as progress: the bytes of closed connections are not counted on."""

    def __init__(self) -> None:
        self._kind: object = None
        self._value = 0
        self._since_s = 0.0
        self.usual_s = 0.0  # the longest time without a change after which it went on
        self.unchanged_s = 0.0

    def add(self, now_s: float, kind: object, value: int) -> None:
        """`now_s` is monotonic. A measure of another kind begins anew."""
        if kind != self._kind:
            self._kind, self._value, self._since_s, self.usual_s = kind, value, now_s, 0.0
        elif value != self._value:
            self.usual_s = max(self.usual_s, now_s - self._since_s)
            self._value, self._since_s = value, now_s
        self.unchanged_s = now_s - self._since_s

    def paused(self, now_s: float) -> None:
        """It was not to make progress, because it was being moved."""
        self._since_s, self.unchanged_s = now_s, 0.0
