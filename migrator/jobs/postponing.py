"""When a snapshot of a protected job is put off: the job asks for it, or the pause would be too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from migrator.find_rank import Found
from snapshotd.api import snapshotd_pb2 as pb


@dataclass
class Postponing:
    unless_file: Path | None = None  # no snapshot is taken while it exists
    max_pause_s: float | None = None
    _measured: tuple[float, int] | None = None  # the last pause, and the memory of the job then

    def measured(self, pause_s: float, ranks: Sequence[Found]) -> None:
        self._measured = pause_s, memory_bytes(ranks)

    def why(self, ranks: Sequence[Found]) -> str:
        """Why no snapshot is taken now; empty: nothing is against it. The pause of the first one is not known."""
        if self.unless_file is not None and self.unless_file.exists():
            return f"{self.unless_file} exists"
        expected_s = self.expected_s(ranks)
        if self.max_pause_s is None or expected_s <= self.max_pause_s:
            return ""
        limit = f"--max-pause is {self.max_pause_s:g} s"
        return f"it would pause the job for about {expected_s:.1f} s, and {limit}; the one before it is kept"

    def expected_s(self, ranks: Sequence[Found]) -> float:
        """The pause grows with the memory of the job. 0: nothing was measured."""
        if self._measured is None:
            return 0.0
        pause_s, then_bytes = self._measured
        return pause_s * max(1, memory_bytes(ranks)) / max(1, then_bytes)


def memory_bytes(ranks: Sequence[Found]) -> int:
    """Of the largest rank: all are paused at the same time."""
    here = [one.rank for one in ranks if one.rank.place == pb.Rank.HERE]
    return max((one.memory_bytes + one.device_bytes for one in here), default=0)
