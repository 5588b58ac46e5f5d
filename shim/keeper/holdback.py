"""Holds back the failure of a rank whose job has snapshots, until the job is rolled back or the time for that is over.

Invariant: exit status 0 is never held back, and a failure at most HOLD_BACK_S. A rank that its launcher or a person has asked
to end (Ctrl-C) ends at once: what it does then is no failure. The keeper decides nothing about rollbacks: it reports the
failure, and waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from shim.keeper.loop import Loop

#: Longer than a rollback needs to be decided and to reach this node, also if another node is cut off.
HOLD_BACK_S = 60.0
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP})


class HoldBack:
    """`tell`: reports the wait status to the daemon. `pass_on`: lets it become the rank's end."""

    def __init__(self, loop: Callable[[], Loop], tell: Callable[[int], None], pass_on: Callable[[int], None]) -> None:
        self._loop, self._tell, self._pass_on = loop, tell, pass_on
        self._status: int | None = None
        self._turn = 0  # a timer of an earlier failure has no effect
        self.is_on = False

    @property
    def is_holding(self) -> bool:
        return self._status is not None

    def holds(self, status: int) -> bool:
        """The rank has ended with this wait status. Returns whether that is held back."""
        if not self.is_on or status == 0:
            return False
        self._status = status
        self._turn += 1
        turn = self._turn
        self._loop().after(HOLD_BACK_S, lambda: self._time_is_over(turn))
        self._tell(status)
        return True

    def asked_to_end(self, number: int) -> None:
        """A signal is forwarded to the rank. If it asks the rank to end, that is not held back, until the next snapshot: a
        rank that goes on all the same is protected again then."""
        if number in _ENDING:
            self.is_on = False
            status, self._status = self._status, None
            if status is not None:
                self._pass_on(status)

    def typed(self, data: bytes) -> None:
        """Keys for a rank on a terminal, whose kernel makes signals of some."""
        if b"\x03" in data or b"\x1c" in data:
            self.asked_to_end(signal.SIGINT)

    def tell_again(self) -> None:
        """The daemon was restarted."""
        if self._status is not None:
            self._tell(self._status)

    def forget(self) -> None:
        """The job was rolled back: the rank has not ended."""
        self._status = None

    def _time_is_over(self, turn: int) -> None:
        status, self._status = (self._status, None) if turn == self._turn else (None, self._status)
        if status is not None:
            self._pass_on(status)
