"""The maintenance calendar: when a node has a window, and what follows from that. Pure.

Invariant: the calendar drains a node once for each window, and returns only what it has drained itself: what an operator has
ordered since counts, and so does a taint from before. That is read from the record of orders, so a restart changes nothing.
"""

from __future__ import annotations

import math
import zoneinfo
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from migrator.autopilot.model import OUT, NodeState, Order
from migrator.autopilot.policy import Maintenance, Policy
from migrator.autopilot.world import World

#: In whose name the calendar gives orders.
CALENDAR = "the maintenance calendar"
_WEEK = timedelta(days=7)


@dataclass(frozen=True)
class Window:
    lead_unix_s: float  # from then on the node is drained, and nothing is placed there
    begin_unix_s: float
    end_unix_s: float
    begin: str  # as texts, in the time zone of the policy
    end: str
    reason: str

    @property
    def text(self) -> str:
        return f"maintenance from {self.begin} to {self.end}" + (f": {self.reason}" if self.reason else "")


def window_at(policy: Policy, node: str, now: float) -> Window | None:
    """The window of a node that has begun, or whose drain should have begun, and that is not over."""
    found = next_window(policy, node, now)
    return found if found is not None and found.lead_unix_s <= now else None


def next_window(policy: Policy, node: str, now: float) -> Window | None:
    """The first window of a node that is not over. Of windows that overlap, the one that ends last."""
    if not policy.maintenance:
        return None
    zone = zoneinfo.ZoneInfo(policy.timezone)
    tables = [table for table in policy.maintenance if table.matches(node)]
    found = [window for table in tables for window in _occurrences(table, zone, now) if window.end_unix_s > now]
    if not found:
        return None
    first = min(found, key=lambda window: window.lead_unix_s)
    return max((one for one in found if one.lead_unix_s <= max(now, first.lead_unix_s)), key=lambda one: one.end_unix_s)


def _occurrences(table: Maintenance, zone: zoneinfo.ZoneInfo, now: float) -> list[Window]:
    """The windows of a table around a time. A weekly one begins at the same time of the clock, also in summer."""
    first = datetime.fromisoformat(table.begin)
    if table.repeat == "none":
        return [_window(table, zone, first)]
    weeks = math.floor((now - first.replace(tzinfo=zone).timestamp()) / _WEEK.total_seconds())
    return [_window(table, zone, first + _WEEK * number) for number in range(max(0, weeks - 1), max(0, weeks) + 3)]


def _window(table: Maintenance, zone: zoneinfo.ZoneInfo, begin: datetime) -> Window:
    begin_s = begin.replace(tzinfo=zone).timestamp()
    end_s = begin_s + table.hours * 3600
    texts = [datetime.fromtimestamp(moment, zone).strftime("%Y-%m-%d %H:%M %Z") for moment in (begin_s, end_s)]
    return Window(begin_s - table.lead_s, begin_s, end_s, texts[0], texts[1], table.reason)


# ---------------------------------------------------------------------- decisions


class MaintenanceDecision(StrEnum):
    KEEP = "keep"
    DRAIN = "drain"
    RETURN = "return"
    ALERT = "alert"


@dataclass(frozen=True)
class MaintenanceFacts:
    state: NodeState
    answers: bool = True
    window: str = ""  # that has begun or begins soon
    ordered: bool = False  # an order about the node is in progress
    drained: bool = False  # the last order about it was the calendar's, to drain it, and it was not used since
    tainted: bool = False  # and it was tainted before
    handled: bool = False  # an order about it was given since the drain for this window was due
    returned: bool = False  # the last order about it was the calendar's, to return it


def maintenance_next(facts: MaintenanceFacts) -> tuple[MaintenanceDecision, str]:
    """What the calendar does about one node, and the reason as text."""
    if facts.ordered:
        return MaintenanceDecision.KEEP, "an order about it is in progress"
    if facts.window:
        if facts.state in OUT - {NodeState.TAINTED}:
            return MaintenanceDecision.KEEP, f"it is {facts.state}, and has {facts.window}"
        if facts.handled:
            return MaintenanceDecision.KEEP, f"an operator uses it again, although it has {facts.window}"
        return MaintenanceDecision.DRAIN, facts.window
    out = facts.state in (NodeState.DRAINING, NodeState.DRAINED, NodeState.REPAIRING)
    if facts.drained and out:
        if not facts.answers:
            return MaintenanceDecision.ALERT, "its maintenance is over, but it does not answer"
        if facts.tainted:
            text = "its maintenance is over, but it was tainted before: `migrator return` when it may be used again"
            return MaintenanceDecision.ALERT, text
        return MaintenanceDecision.RETURN, "its maintenance is over"
    if facts.returned and facts.state is NodeState.REPAIRING:
        return (
            MaintenanceDecision.ALERT,
            "its maintenance is over, but its validation failed: repair it, then `migrator return`",
        )
    return MaintenanceDecision.KEEP, "it has no maintenance now"


def about_maintenance(
    world: World, policy: Policy, node: str, last: Order | None, now: float
) -> tuple[MaintenanceDecision, str]:
    """`last` is the last order about the node."""
    known, window = world.nodes[node], window_at(policy, node, now)
    mine = last is not None and last.by == CALENDAR and not last.used_again
    drained = mine and last is not None and last.empties
    return maintenance_next(
        MaintenanceFacts(
            state=known.state,
            answers=known.seen and known.reachable,
            window=window.text if window is not None else "",
            ordered=any(order.node == node and order.kind != "move" for order in world.orders),
            drained=drained,
            tainted=last is not None and last.before == NodeState.TAINTED,
            handled=last is not None and window is not None and last.since_unix_s >= window.lead_unix_s,
            returned=mine and not drained,
        )
    )
