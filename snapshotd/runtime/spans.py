"""Records where the time of a move goes on this node: spans with a name, a beginning and an end, for `migrator move --trace`.

They are recorded for every move, because a driver that asks for them does so when the move has ended. A span costs a few
microseconds, and only the last KEPT moves, with at most MOST spans each, are kept, in memory. Times are of CLOCK_BOOTTIME of
this node; the driver places them on its own clock.

Invariant: recording never changes what a step does. Outside of `of_move` nothing is recorded.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

#: Moves of which spans are kept, and spans that are kept of each.
KEPT, MOST = 16, 1000


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Span:
    name: str
    began_s: float
    parent: Span | None = None  # the one that encloses it
    ended_s: float = 0.0  # 0: it has not ended
    bytes: int = 0  # that it transferred
    call: bool = False  # a call of this daemon, named "Service.Method"
    failed: bool = False


@dataclass(slots=True)
class Recorded:
    """The spans of one move, in the order in which they began."""

    spans: list[Span] = field(default_factory=list)
    left_out: int = 0  # beyond MOST

    def begin(self, name: str, began_s: float, *, call: bool = False) -> Span | None:
        if len(self.spans) >= MOST:
            self.left_out += 1
            return None
        at = _inside.get()
        parent = at[1] if at is not None and at[0] is self else None
        while parent is not None and parent.ended_s:  # a task that it began, and that outlives it
            parent = parent.parent
        self.spans.append(made := Span(name, began_s, parent, call=call))
        return made


_moves: OrderedDict[str, Recorded] = OrderedDict()
#: The move that the caller works for, and the span that encloses it.
_inside: ContextVar[tuple[Recorded, Span | None] | None] = ContextVar("span", default=None)


@contextmanager
def of_move(move: str, call: str) -> Iterator[None]:
    """Spans inside, also in threads and tasks that are started there, are of this move. The call itself is one, too."""
    if not move:
        yield
        return
    recorded = _moves.setdefault(move, Recorded())
    _moves.move_to_end(move)
    while len(_moves) > KEPT:
        _moves.popitem(last=False)
    token = _inside.set((recorded, None))
    try:
        with _span(recorded, call, call=True):
            yield
    finally:
        _inside.reset(token)


@contextmanager
def span(name: str, bytes_: int = 0) -> Iterator[Span]:
    """What happens inside is a span of the move that the caller works for. Its `bytes` may be set until it ends."""
    at = _inside.get()
    if at is None:
        yield Span(name, 0.0)
        return
    with _span(at[0], name) as made:
        made.bytes = bytes_
        yield made


@contextmanager
def _span(recorded: Recorded, name: str, *, call: bool = False) -> Iterator[Span]:
    made = recorded.begin(name, now_s(), call=call)
    if made is None:
        yield Span(name, 0.0)
        return
    token = _inside.set((recorded, made))
    try:
        yield made
    except BaseException:
        made.failed = True
        raise
    finally:
        made.ended_s = now_s()
        _inside.reset(token)


def add(name: str, seconds: float, bytes_: int = 0) -> None:
    """A span that ends now and was measured by the caller."""
    at = _inside.get()
    if at is None:
        return
    ended_s = now_s()
    if (made := at[0].begin(name, ended_s - seconds)) is not None:
        made.ended_s, made.bytes = ended_s, bytes_


def of(move: str) -> Recorded:
    """What was recorded. Empty for a move that is not known here, or was before a restart."""
    return _moves.get(move) or Recorded()
