"""Predicts the pause of a move from what is to be copied, and from how long earlier moves of the same nodes took.

Every phase of the pause takes a fixed time, and time in proportion to the host and device memory. Without earlier moves, the
numbers below are used, which were measured on one kind of machine. With them, each phase is fitted to what it really took:
median of the fixed part, and of the slope where sizes differ enough to tell. Medians, because single moves are disturbed by
whatever else the nodes do.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """What a move copies, as preflight sees it: upper bounds."""

    host_bytes: int
    device_bytes: int = 0
    nccl: bool = False  # the rank is in a communicator


@dataclass(frozen=True)
class Law:
    """How long a phase takes."""

    fixed_s: float
    host_gib_s: float = 0.0  # seconds for each GiB of host memory
    device_gib_s: float = 0.0
    device_s: float = 0.0  # more for a rank that uses a GPU at all
    only_with_nccl: bool = False

    def growing_s(self, size: Size) -> float:
        """The part that depends on the size."""
        return (self.host_gib_s * size.host_bytes + self.device_gib_s * size.device_bytes) / GIB

    def seconds(self, size: Size) -> float:
        return self.fixed_s + self.growing_s(size) + (self.device_s if size.device_bytes else 0.0)


#: The phases of the pause in their order, with what they take if nothing is known of the nodes.
PHASES: dict[str, Law] = {
    "detach": Law(0.07, only_with_nccl=True),
    "freeze": Law(0.08, device_gib_s=0.03, device_s=0.9),
    "stream": Law(0.2, host_gib_s=0.9, device_gib_s=0.03),
    "restore": Law(0.25, host_gib_s=0.6, device_gib_s=0.03, device_s=0.8),
    "reattach": Law(0.11, only_with_nccl=True),
    "re-point": Law(0.02),
    "commit": Law(0.02),
    "activate": Law(0.03),
    "open": Law(0.02, only_with_nccl=True),
}
#: Earlier moves that count, the newest first.
MOST_SAMPLES = 20
#: Earlier moves tell how a phase grows with size if they differ by so many seconds, by the numbers above.
SPREAD_S = 0.25


@dataclass(frozen=True)
class Sample:
    """An earlier move that ended well."""

    nodes: frozenset[str]
    size: Size
    phases: dict[str, float]
    ended_unix_s: float


@dataclass(frozen=True)
class PredictedPart:
    name: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Estimate:
    size: Size
    parts: list[PredictedPart]
    basis: str  # what it was made from, for display
    samples: int

    @property
    def pause_s(self) -> float:
        return sum(part.seconds for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "pause_s": round(self.pause_s, 4),
            "host_bytes": self.size.host_bytes,
            "device_bytes": self.size.device_bytes,
            "parts": [
                {"name": part.name, "seconds": round(part.seconds, 4), "bytes": part.bytes} for part in self.parts
            ],
            "basis": self.basis,
            "samples": self.samples,
        }


def predict(size: Size, source: str, target: str, samples: Iterable[Sample]) -> Estimate:
    """The pause of a move of this size between these nodes."""
    chosen, basis = _choose(size, source, target, samples)
    parts = []
    for name, law in PHASES.items():
        if law.only_with_nccl and not size.nccl:
            continue
        seconds = _fitted(law, size, [(one.size, one.phases[name]) for one in chosen if name in one.phases])
        copied = (size.host_bytes if law.host_gib_s else 0) + (size.device_bytes if law.device_gib_s else 0)
        parts.append(PredictedPart(name, seconds, copied))
    return Estimate(size, parts, basis, len(chosen))


def _choose(size: Size, source: str, target: str, samples: Iterable[Sample]) -> tuple[list[Sample], str]:
    """The earlier moves that are most like this one, and what they are, for display."""
    alike = [one for one in samples if bool(one.size.device_bytes) == bool(size.device_bytes)]
    alike.sort(key=lambda one: one.ended_unix_s, reverse=True)
    between = [one for one in alike if one.nodes == {source, target}][:MOST_SAMPLES]
    if between:
        return between, f"from {_count(between)} between {source} and {target}"
    touching = [one for one in alike if one.nodes & {source, target}][:MOST_SAMPLES]
    if touching:
        return touching, f"from {_count(touching)} of these nodes with others"
    return [], "from built-in numbers: these nodes have no earlier move of such a rank"


def _count(samples: Sequence[Sample]) -> str:
    return "1 earlier move" if len(samples) == 1 else f"{len(samples)} earlier moves"


def _fitted(law: Law, size: Size, known: Sequence[tuple[Size, float]]) -> float:
    """Seconds of a phase: those of the law, with its fixed part and its slope replaced by what earlier moves took."""
    if not known:
        return law.seconds(size)
    points = [(law.growing_s(earlier), seconds) for earlier, seconds in known]
    lowest, highest = min(x for x, _ in points), max(x for x, _ in points)
    slope = 1.0
    if highest - lowest >= SPREAD_S:
        apart = [(one, other) for one, other in combinations(points, 2) if abs(one[0] - other[0]) >= SPREAD_S / 2]
        slope = max(0.0, statistics.median((other[1] - one[1]) / (other[0] - one[0]) for one, other in apart))
    fixed_s = statistics.median(seconds - slope * x for x, seconds in points)
    if fixed_s < 0:  # the law is too slow for these nodes
        slope, fixed_s = statistics.median(seconds / x for x, seconds in points if x > 0), 0.0
    return fixed_s + slope * law.growing_s(size)
