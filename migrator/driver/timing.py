"""Places what daemons have recorded on the driver's clock. Pure: no I/O, no clock except for `Call.end`.

The clocks of nodes differ, and wall clocks jump. What is certain is the order of a call: the driver sends it, the daemon
receives it, the daemon answers, the driver has the answer. So each call gives two limits for the difference of the clocks;
all calls of a node together narrow it to less than the shortest round trip.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb


@dataclass
class Timed:
    """Something with a beginning and an end, on the driver's clock."""

    name: str
    began_s: float
    ended_s: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)
    parent: Timed | None = None


@dataclass
class Call:
    """A call of the driver to a node's daemon."""

    node: str
    method: str  # Service.Method
    began_s: float
    ended_s: float = 0.0  # 0: not yet
    failed: bool = False

    def end(self, *, failed: bool = False) -> None:
        if not self.ended_s:
            self.ended_s, self.failed = time.monotonic(), failed


@dataclass(frozen=True)
class NodeSpans:
    """What one daemon answered, when the driver asked for it and had the answer, and the driver's calls to that daemon."""

    node: str
    roles: Sequence[str]
    asked_s: float
    answered_s: float
    reply: pb.GetSpansReply
    calls: Sequence[Call]

    def clock(self) -> tuple[float, float]:
        """What to add to the node's times for the driver's, and by how much that may be wrong."""
        return difference([*self._limits(), (self.asked_s - self.reply.now_s, self.answered_s - self.reply.now_s)])

    def _limits(self) -> Iterable[tuple[float, float]]:
        """From the calls that were made once and served once: of others it is not certain which is which."""
        made = Counter(call.method for call in self.calls)
        served = Counter(span.name for span in self.reply.spans if span.call)
        once = {span.name: span for span in self.reply.spans if span.call and served[span.name] == 1}
        for call in self.calls:
            span = once.get(call.method)
            if span is not None and made[call.method] == 1 and call.ended_s and not (call.failed or span.unfinished):
                yield call.began_s - span.began_s, call.ended_s - (span.began_s + span.seconds)

    def placed(self) -> list[Timed]:
        """Its spans on the driver's clock. One never exceeds the span that encloses it."""
        add_s, _ = self.clock()
        made: list[Timed] = []
        for span in self.reply.spans:
            parent = made[span.parent - 1] if 0 < span.parent <= len(made) else None
            began_s, ended_s = span.began_s + add_s, span.began_s + max(0.0, span.seconds) + add_s
            if parent is not None:
                began_s = min(max(began_s, parent.began_s), parent.ended_s)
                ended_s = max(began_s, min(ended_s, parent.ended_s))
            made.append(Timed(span.name, began_s, ended_s, _args(span), parent))
        return made


def _args(span: pb.Span) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.bytes:
        args["bytes"] = span.bytes
        args["GB/s"] = round(span.bytes / 1e9 / span.seconds, 3) if span.seconds > 0 else 0.0
    for name in ("failed", "unfinished"):
        if getattr(span, name):
            args[name] = True
    return args


def difference(limits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The difference of two clocks for which all limits hold, and how far it may be off.

    If no difference satisfies all of them, because a clock has drifted or the node was suspended, the narrowest counts."""
    lowest, highest = max(low for low, _ in limits), min(high for _, high in limits)
    if lowest > highest:
        lowest, highest = min(limits, key=lambda one: one[1] - one[0])
    return (lowest + highest) / 2, abs(highest - lowest) / 2
