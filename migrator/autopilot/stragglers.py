"""The rank that the others of its job wait for, and how much the job loses by it. Pure: over readings of counters.

A reading is how many collectives each member of a communicator had launched at one moment, as an early and a late number
(proto/snapshotd.proto): a member whose late number is less than the early one of another was behind it for certain. The
job waits for a rank that is behind all other members of one of its communicators, and is itself ahead of none: a rank
that waits in one communicator is late in all others, and is not the cause.

Being the last one means nothing by itself. A program runs ahead of its GPU, so a rank may launch later than the
others all the time and delay no other rank. And a job may become slower because all of its ranks do more. So both
must have happened: the job makes fewer collectives in a second than it has made before, and the rank is the last one
more often than it was then. The loss is the smaller one of the two, so it is rather too small than too large. A rank
that was slow from the beginning is not recognised, and a GPU that became slow only if the program waits for it
between collectives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Readings over which the rate of a job and the shares of its ranks are measured, and how many are enough.
WINDOW = 60
LEAST_READINGS = 30
#: So much of the waiting must be for one rank. Otherwise they take turns, which no move would cure.
ONE_RANK_SHARE = 0.8
#: An alarm that was raised ends only below this share of the loss for which it was raised.
HYSTERESIS = 0.5
#: What is counted as lost between two readings: nothing is known of a longer time without readings.
MOST_STEP_S = 10.0


class Counted(NamedTuple):  # there are many of them
    """One member of a communicator in one reading."""

    uid: str
    node: str
    early: int
    late: int


@dataclass
class Group:
    """The members of one communicator that were read, by their rank in it."""

    nranks: int
    members: dict[int, Counted] = field(default_factory=dict)
    contested: bool = False  # two nodes claim to have the same member: one of them lies, and nothing is concluded

    def add(self, member: int, counted: Counted) -> None:
        known = self.members.setdefault(member, counted)
        if known is not counted and known[:2] != counted[:2]:
            self.contested = True

    @property
    def complete(self) -> bool:
        return len(self.members) == self.nranks and not self.contested


def waited_for(groups: Iterable[Group]) -> str | None:
    """The one rank that the others wait for in this reading; None: there is none, or there are several."""
    last: set[str] = set()
    waiting: set[str] = set()
    for group in groups:
        found = sorted(group.members.values(), key=lambda one: one.late)
        lowest = found[0].late
        waiting.update(one.uid for one in found if one.early > lowest)
        if all(one.early > lowest for one in found[1:] if one.uid != found[0].uid):
            last.add(found[0].uid)
    roots = last - waiting
    return roots.pop() if len(roots) == 1 else None


@dataclass(frozen=True)
class Straggler:
    uid: str
    node: str
    lost_share: float  # of the job's time
    lost_s: float  # since it was noticed
    since_unix_s: float
    usual_per_s: float  # collectives of the job in a second, before
    now_per_s: float
    others: int  # ranks that wait
    confirmed: bool  # by its own node, or by two others: one node alone could have invented it


class Watch:
    """One job."""

    def __init__(self) -> None:
        self._readings: deque[tuple[int, str | None, int]] = deque(maxlen=WINDOW)
        self._comm = 0
        self._places: dict[str, str] = {}
        self._best_per_s = 0.0
        self._usual_share: dict[str, float] = {}
        self.straggler: Straggler | None = None

    @property
    def latest(self) -> tuple[int, int]:
        """The widest communicator, and the collectives of its slowest member in the last reading."""
        return self._comm, self._readings[-1][2] if self._readings else 0

    @property
    def settled(self) -> bool:
        """Whether there are enough readings to say something."""
        return len(self._readings) >= LEAST_READINGS

    def resume(self, straggler: Straggler) -> None:
        """Takes up what was known before a restart of the autopilot."""
        self._best_per_s, self.straggler = straggler.usual_per_s, straggler

    def expire(self) -> None:
        """Nothing was read for long: the rank that was named before may have become fast again."""
        self._readings.clear()
        self.straggler = None

    def add(self, number: int, period_s: float, groups: Mapping[int, Group], least_share: float) -> None:
        """Takes in one reading. `least_share` of the job's time must be lost for a rank to be named."""
        complete = {comm: group for comm, group in groups.items() if group.complete}
        if not complete:
            return
        main = max(complete, key=lambda comm: (complete[comm].nranks, comm == self._comm, comm))
        members = complete[main].members.values()
        places = {one.uid: one.node for one in members}
        if main != self._comm:
            if self._comm:  # it has made another one: its rate cannot be compared
                self._best_per_s, self._usual_share, self.straggler = 0.0, {}, None
            self._comm, self._places = main, {}
        if places != self._places or (self._readings and number <= self._readings[-1][0]):
            # A rank has moved: what follows is measured anew, and compared with what was usual before.
            self._readings.clear()
            self._places = places
        slowest = min(one.late for one in members)
        self._readings.append((number, waited_for(complete.values()), slowest))
        self._judge(period_s, least_share)

    def _judge(self, period_s: float, least_share: float) -> None:
        if self.straggler is not None and self._places.get(self.straggler.uid) != self.straggler.node:
            self.straggler = None  # it has moved
        if not self.settled:
            return
        count = len(self._readings)
        (first, _, least), (last, _, most) = self._readings[0], self._readings[-1]
        per_s = (most - least) / ((last - first) * period_s)
        named = Counter(root for _, root, _ in self._readings if root is not None)
        if per_s > self._best_per_s:
            self._best_per_s = per_s
            self._usual_share = {uid: times / count for uid, times in named.items()}
        found = self._found(named, count, 1 - per_s / self._best_per_s if self._best_per_s else 0.0)
        known = self.straggler
        if known is not None and (found is None or found[0] != known.uid or found[1] < HYSTERESIS * least_share):
            known = self.straggler = None
        if found is None or (known is None and found[1] < least_share):
            return
        uid, share = found
        step_s = min(MOST_STEP_S, (last - self._readings[-2][0]) * period_s)
        elsewhere = {node for other, node in self._places.items() if other != uid}
        self.straggler = Straggler(
            uid=uid,
            node=self._places[uid],
            lost_share=share,
            lost_s=(known.lost_s if known is not None else 0.0) + share * step_s,
            since_unix_s=known.since_unix_s if known is not None else last * period_s,
            usual_per_s=self._best_per_s,
            now_per_s=per_s,
            others=len(self._places) - 1,
            confirmed=self._places[uid] in elsewhere or len(elsewhere) > 1,
        )

    def _found(self, named: Counter[str], count: int, slower: float) -> tuple[str, float] | None:
        """The rank that is waited for more often than usual, and the share of the job's time that it costs."""
        if not named:
            return None
        ((uid, times),) = named.most_common(1)
        if times < ONE_RANK_SHARE * named.total() or uid not in self._places:
            return None
        share = min(slower, times / count - self._usual_share.get(uid, 0.0))
        return (uid, share) if share > 0 else None
