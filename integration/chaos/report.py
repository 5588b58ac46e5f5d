"""The table at the end: how often each kind of fault occurred, the outcomes of the moves, and how long settling took."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One round."""

    number: int
    kind: str
    fault: str
    job: str
    outcome: str
    move_s: float
    settle_s: float
    recovers: int


@dataclass
class Report:
    seed: int
    options: list[str] = field(default_factory=list)  # of `make chaos`, that give the same rounds
    entries: list[Entry] = field(default_factory=list)
    broken: str = ""
    scans: int = 0
    longest_gap_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def repeat(self) -> str:
        """The command that repeats these rounds."""
        return f"make chaos SEED={self.seed}" + (f' CHAOS="{" ".join(self.options)}"' if self.options else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.began_s, 1),
            "broken": self.broken,
            "scans": self.scans,
            "longest_gap_s": round(self.longest_gap_s, 2),
            "rounds": [asdict(entry) for entry in self.entries],
        }

    def table(self) -> str:
        rows = [("fault", "rounds", "settle (s): median", "max", "recover", "outcomes")]
        for kind in [*dict.fromkeys(sorted(entry.kind for entry in self.entries)), "all"]:
            of_kind = [entry for entry in self.entries if kind in (entry.kind, "all")]
            if not of_kind:
                continue
            settle = [entry.settle_s for entry in of_kind]
            outcomes = Counter(entry.outcome for entry in of_kind).most_common()
            rows.append(
                (
                    kind,
                    str(len(of_kind)),
                    f"{statistics.median(settle):.1f}",
                    f"{max(settle):.1f}",
                    str(sum(entry.recovers for entry in of_kind)),
                    ", ".join(f"{outcome} {count}" for outcome, count in outcomes),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = []
        for row in rows:
            numbers = "  ".join(text.rjust(width) for text, width in zip(row[1:5], widths[1:], strict=True))
            lines.append(f"{row[0].ljust(widths[0])}  {numbers}  {row[5]}")
        jobs = ", ".join(f"{kind} {count}" for kind, count in Counter(entry.job for entry in self.entries).items())
        minutes = (time.monotonic() - self.began_s) / 60
        lines += [
            f"seed {self.seed}, {len(self.entries)} rounds in {minutes:.1f} minutes; jobs: {jobs or 'none'}",
            f"{self.scans} scans for second copies, the longest gap {self.longest_gap_s:.2f} s",
        ]
        return "\n".join(lines)
