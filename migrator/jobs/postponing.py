"""When a snapshot of a protected job is put off: the job asks for it, or the pause would be too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from migrator.find_rank import Found
from snapshotd.api import snapshotd_pb2 as pb

#: Pauses that are remembered: a single one may have been long because a node was busy.
MEASURED = 3
#: What was measured is not believed for longer. Otherwise a job that was paused for too long would never be protected again.
BELIEVED_S = 3600.0


@dataclass
class Postponing:
    unless_file: Path | None = None  # no snapshot is taken while it exists
    max_pause_s: float | None = None
    clock: Callable[[], float] = field(default=time.monotonic, compare=False)
    #: For each byte of memory.
    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED), compare=False)
    _measured_s: float = field(default=0.0, compare=False)

    def measured(self, pause_s: float, ranks: Sequence[Found]) -> None:
        self._measured.append(pause_s / max(1, memory_bytes(ranks)))
        self._measured_s = self.clock()

    def why(self, ranks: Sequence[Found]) -> str:
        """Why no snapshot is taken now; empty: nothing is against it. The pause of the first one is not known."""
        if self.unless_file is not None and self.unless_file.exists():
            return f"{self.unless_file} exists"
        if self.max_pause_s is None or self.expected_s(ranks) <= self.max_pause_s:
            return ""
        limit = f"for longer than {self.max_pause_s:g} s (--max-pause)"
        return f"it would pause the job {limit}; the one before it is kept, and in an hour one is taken all the same"

    def expected_s(self, ranks: Sequence[Found]) -> float:
        """The pause grows with the memory of the job. 0: nothing is known."""
        if not self._measured or self.clock() > self._measured_s + BELIEVED_S:
            return 0.0
        return min(self._measured) * memory_bytes(ranks)


def memory_bytes(ranks: Sequence[Found]) -> int:
    """Of the largest rank: all are paused at the same time."""
    here = [one.rank for one in ranks if one.rank.place == pb.Rank.HERE]
    return max((one.memory_bytes + one.device_bytes for one in here), default=0)
