"""Tells a fault of the job from bad luck: counts the rollbacks after which a job has failed again. Pure.

A snapshot alone does not show that a job is well: with a short interval one is taken between a rollback and the step at which
a faulty job fails again. So the count begins anew only when the job has run for longer since the last rollback than it had
before it failed.
"""

from __future__ import annotations

#: The second run may be slower than the first.
FACTOR, MORE_S = 1.5, 10.0


class Tries:
    def __init__(self, limit: int) -> None:
        """`limit`: how many rollbacks there are before a failure is passed on."""
        self.limit, self.count = limit, 0
        self._since_s: float | None = None  # when the job was last in the state of its last snapshot
        self._rolled_back_s = 0.0
        self._needed_s = 0.0  # how long it has to run to count as well

    def snapshot(self, now_s: float) -> None:
        """A snapshot was taken."""
        if self.count and now_s - self._rolled_back_s > self._needed_s:
            self.count, self._needed_s = 0, 0.0
        self._since_s = now_s

    def failed(self, now_s: float) -> bool:
        """The job has failed. Returns whether it is to be rolled back."""
        lasted_s = now_s - self._since_s if self._since_s is not None else 0.0
        self._needed_s = max(self._needed_s, FACTOR * lasted_s + MORE_S)
        return self.count < self.limit

    def rolled_back(self, now_s: float) -> None:
        self.count += 1
        self._since_s = self._rolled_back_s = now_s
