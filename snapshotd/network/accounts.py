"""What each caller uses of the link between the daemon and its network process, and how much of it there is.

Invariant: no caller can use up what others need. A caller is an operator, a node, root, or the metrics: one name in a
certificate is one caller, over however many connections. For calls of this daemon, the node that is called counts.

The numbers. Callers of a large cluster stay far below them:

- Calls. A node keeps one call (`Home.Relay`) open at the home node of each rank that was moved to it: one for each GPU or
  core, some hundred at most. A move adds `streams` calls of the source (4 by default) and about six of the driver, at each of
  the two nodes: an operator that drains a node of 64 ranks at once has some 400. In a job of 1,000 nodes, each move adds one
  `Gate.Detach` or `Gate.Attach` at each node, and the node that asks has one call to each. Health checks are one call at a
  time. MAX_CALLS are 1,000 callers with 8 calls each, and cost the daemon about 36 MiB.
- Bytes. Only `Target.Push` (where the bulk connection cannot be used) carries much: each of its `streams` has WINDOW_COST
  and one chunk (2 MiB by default) under way, 24 MiB in all. CALLER_COST holds that for two moves between the same two nodes
  without a wait; more of them share the network anyway. Whatever is full, a call may have one small message under way, so
  that no `Renew` or `Commit` waits behind an image.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from snapshotd.network.frames import Dial, Request

MAX_CALLS = 8192
CALLS_PER_CALLER = 1024
#: The cost of a message is its size and this, so that empty messages are bounded as well.
MESSAGE_COST = 64
#: What is under way or unread, in each direction: of one call, of one caller, of the whole link.
WINDOW_COST = 4 << 20
CALLER_COST = 64 << 20
LINK_COST = 256 << 20
#: A call with nothing under way may always send a message of this size: MAX_CALLS of them are 128 MiB.
SMALL_COST = 16 << 10


class Window:
    """Messages of one direction that are under way or unread. Each one counts in the windows that contain this one too."""

    def __init__(self, limit_cost: int, outer: Window | None = None) -> None:
        self.limit_cost, self.outer = limit_cost, outer
        self.used_cost = 0

    def full(self) -> bool:
        return self.used_cost >= self.limit_cost or (self.outer is not None and self.outer.full())

    def admits(self, cost: int) -> bool:
        """Whether a message may follow now. It may exceed the limits itself, so that each size can be sent."""
        return (self.used_cost == 0 and cost <= SMALL_COST) or not self.full()

    def take(self, cost: int) -> None:
        self.used_cost += cost
        if self.outer is not None:
            self.outer.take(cost)

    def give(self, cost: int) -> None:
        self.take(-cost)

    def clear(self) -> None:
        self.give(self.used_cost)


def key_of(opening: Request | Dial) -> Hashable:
    """The caller. For a call of this daemon, the node that it calls."""
    return (opening.role, opening.name) if isinstance(opening, Request) else ("to", opening.node)


@dataclass
class Account:
    """What one caller uses."""

    sending: Window
    unread: Window
    calls: int = 0  # open ones; on the side that serves them, until the servicer has ended


@dataclass
class Accounts:
    """The accounts of one end of a link. One without calls is forgotten."""

    sending: Window = field(default_factory=lambda: Window(LINK_COST))
    unread: Window = field(default_factory=lambda: Window(LINK_COST))
    _by_caller: dict[Hashable, Account] = field(default_factory=dict)

    def of(self, opening: Request | Dial) -> Account:
        """The account of the caller; a new one if it has no calls."""
        found = self._by_caller.get(key_of(opening))
        return found or Account(Window(CALLER_COST, self.sending), Window(CALLER_COST, self.unread))

    def opened(self, opening: Request | Dial, account: Account) -> None:
        """Another call of that caller. `account` is what `of` has returned for it."""
        self._by_caller[key_of(opening)] = account
        account.calls += 1

    def closed(self, opening: Request | Dial) -> None:
        account = self._by_caller[key_of(opening)]
        account.calls -= 1
        if account.calls == 0:
            del self._by_caller[key_of(opening)]
