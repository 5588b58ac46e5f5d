"""What the monitor expects of the checks. A group is what is read together; each of its checks can be switched off."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from snapshotd.health.alarms import Signal

_TOGETHER_S = 0.1


class Unable(Exception):
    """This node cannot be checked for it. The text is the reason."""


@dataclass(frozen=True)
class Now:
    unix_s: float
    monotonic_s: float

    @classmethod
    def taken(cls) -> Now:
        """Both clocks at about the same moment: between two readings of them a busy machine may do something else."""
        while True:
            before, unix_s, after = time.monotonic(), time.time(), time.monotonic()
            if after - before < _TOGETHER_S:
                return cls(unix_s, after)


class Group(ABC):
    #: The names of its checks.
    names: tuple[str, ...] = ()
    #: The time between two readings.
    every_s: float = 10.0
    #: Whether it is read during moves too.
    urgent: bool = False

    @property
    def reasons(self) -> dict[str, str]:
        """Why certain ones of its checks cannot be made, although `read` returned."""
        return {}

    @abstractmethod
    async def read(self, now: Now) -> list[Signal]:
        """One reading. Raises Unable, and OSError, ValueError and TimeoutError, which mean the same."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what it uses. No reading is running."""
