"""The scheduling priority and the resource limits of a process, and how much of both a user's rank may have on this node.

A user cannot raise them, so a rank of a user must not get more through a move than the node's administrator grants: a
restore sets them as root. The grant is what a user's process could give itself under the hard limits of this daemon, from
which restored ranks descend: `LimitMEMLOCK=`, `LimitNICE=` and others in its unit. Limits that restrict only the process
itself (stack, core files, CPU time …) are no privilege, and are not compared.

Only msgspec is imported: the child that examines images needs this module.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable

import msgspec

UNLIMITED = (1 << 64) - 1
#: Kind: its number, and its name in /proc/PID/limits.
_LIMITS = {
    "nproc": (resource.RLIMIT_NPROC, "Max processes"),
    "nofile": (resource.RLIMIT_NOFILE, "Max open files"),
    "memlock": (resource.RLIMIT_MEMLOCK, "Max locked memory"),
    "sigpending": (resource.RLIMIT_SIGPENDING, "Max pending signals"),
    "msgqueue": (resource.RLIMIT_MSGQUEUE, "Max msgqueue size"),
    "nice": (resource.RLIMIT_NICE, "Max nice priority"),
    "rtprio": (resource.RLIMIT_RTPRIO, "Max realtime priority"),
}
#: All kinds that a kernel has, compared or not.
LIMIT_KINDS = 16
_LINE = re.compile(r"^(Max(?: [a-z]+)+) {2,}(\S+) +(\S+)", re.MULTILINE)
#: Policies that every user may choose: normal, batch, idle, extensible.
_OF_EVERYONE = (0, 3, 5, 7)
_REALTIME = (1, 2)  # first in first out, round robin
#: Stands for policies that no limit grants, such as that of deadlines.
_MORE_THAN_REALTIME = 100


class Priorities(msgspec.Struct, frozen=True):
    """What processes have at most, or may have."""

    nice: int = 19  # the lowest, which is the highest priority
    realtime: int = 0  # the highest priority of a real-time policy; 0: none
    limits: dict[str, int] = {}  # the highest hard limit of each kind


def granted() -> Priorities:
    """What a user's rank may have on this node."""
    hard = {kind: _number(resource.getrlimit(number)[1]) for kind, (number, _) in _LIMITS.items()}
    return Priorities(nice=min(0, max(-20, 20 - hard["nice"])), realtime=min(99, hard["rtprio"]), limits=hard)


def read(pid: int) -> Priorities:
    """What a process and its threads have. Raises FileNotFoundError or ProcessLookupError if it has ended."""
    with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
        limits = hard_limits(file.read())
    threads = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        threads.append(of_thread(int(fields[16]), int(fields[38]), int(fields[37])))
    return highest([Priorities(limits=limits), *threads])


def hard_limits(text: str) -> dict[str, int]:
    """Of a /proc/PID/limits."""
    found = {name: hard for name, _, hard in _LINE.findall(text)}
    return {kind: UNLIMITED if found[name] == "unlimited" else int(found[name]) for kind, (_, name) in _LIMITS.items()}


def of_thread(nice: int, policy: int, priority: int) -> Priorities:
    if policy in _OF_EVERYONE:
        return Priorities(nice=nice)
    return Priorities(nice=nice, realtime=max(1, priority) if policy in _REALTIME else _MORE_THAN_REALTIME)


def of_limits(hard: Iterable[int]) -> Priorities:
    """Given the hard limits in the kernel's order."""
    numbers = list(hard)
    return Priorities(limits={kind: numbers[number] for kind, (number, _) in _LIMITS.items() if number < len(numbers)})


def highest(several: Iterable[Priorities]) -> Priorities:
    nice, realtime, limits = 19, 0, dict[str, int]()
    for one in several:
        nice, realtime = min(nice, one.nice), max(realtime, one.realtime)
        limits = {kind: max(limits.get(kind, 0), one.limits.get(kind, 0)) for kind in limits.keys() | one.limits.keys()}
    return Priorities(nice, realtime, limits)


def beyond(held: Priorities, grant: Priorities) -> list[str]:
    """What is held although it is not granted, in words."""
    found = []
    if held.nice < grant.nice:
        found.append(f"nice {held.nice} (at least {grant.nice})")
    if held.realtime > grant.realtime:
        found.append(f"real-time priority {held.realtime} (at most {grant.realtime})")
    for kind, limit in sorted(held.limits.items()):
        most = grant.limits.get(kind, 0)
        if limit > most:
            found.append(f"limit {kind} {_words(limit)} (at most {_words(most)})")
    return found


def _words(limit: int) -> str:
    return "unlimited" if limit >= UNLIMITED else str(limit)


def _number(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit
