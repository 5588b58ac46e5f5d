"""How many connections one user may have to the keeper's socket.

Invariant: no user can use up what another user needs. A connection is counted by the user that the kernel names, before
anything is read from it. Root's connections (guest keepers) always find room that users cannot take.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto

#: Descriptors of one connection: the socket and the keeper's pidfd.
_DESCRIPTORS = 2


@dataclass(frozen=True)
class Limits:
    """Limits of connections. One is silent until its first message was read."""

    per_user: int = 1024
    silent_per_user: int = 256
    total: int = 16384
    for_root: int = 2048  # part of `total` that only root can use

    @classmethod
    def within(cls, per_user: int, descriptors: int) -> Limits:
        """Limits that leave at least half of the daemon's descriptors to its other work."""
        total = min(cls.total, descriptors // 2 // _DESCRIPTORS)
        per_user = max(1, min(per_user, total // 4))
        return cls(per_user, max(1, min(cls.silent_per_user, per_user // 2)), total, total // 8)


class Verdict(Enum):
    ACCEPT = auto()
    LATER = auto()  # too many silent ones: the keeper retries by itself
    REFUSE = auto()


class Connections:
    """Counts the open connections by user."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._silent: Counter[int] = Counter()
        self._all: Counter[int] = Counter()

    def verdict(self, user_id: int) -> tuple[Verdict, str]:
        """Whether this user may open another connection, and why not."""
        limits, total = self.limits, self._all.total()
        if user_id == 0:
            full = total >= limits.total
            return (Verdict.LATER, f"{total} keepers are connected") if full else (Verdict.ACCEPT, "")
        if self._all[user_id] >= limits.per_user:
            return Verdict.REFUSE, f"user {user_id} has {self._all[user_id]} keepers connected, which is the limit"
        if self._silent[user_id] >= limits.silent_per_user:
            return Verdict.LATER, f"user {user_id} has {self._silent[user_id]} connections that have sent nothing yet"
        if total >= limits.total - limits.for_root:
            return Verdict.LATER, f"{total} keepers are connected"
        return Verdict.ACCEPT, ""

    def opened(self, user_id: int) -> Counted:
        self._silent[user_id] += 1
        self._all[user_id] += 1
        return Counted(self, user_id)

    def spoke(self, user_id: int) -> None:
        _subtract(self._silent, user_id)

    def closed(self, user_id: int) -> None:
        _subtract(self._all, user_id)


class Counted:
    """One open connection."""

    def __init__(self, connections: Connections, user_id: int) -> None:
        self._connections = connections
        self._is_silent = self._is_open = True
        self.is_served = False  # its socket belongs to the task that serves it
        self.user_id = user_id

    def spoke(self) -> None:
        """Its first message was read. Idempotent."""
        if self._is_silent:
            self._is_silent = False
            self._connections.spoke(self.user_id)

    def close(self) -> None:
        """Idempotent."""
        self.spoke()
        if self._is_open:
            self._is_open = False
            self._connections.closed(self.user_id)


def _subtract(counts: Counter[int], user_id: int) -> None:
    counts[user_id] -= 1
    if counts[user_id] <= 0:
        del counts[user_id]
