"""How a check speaks: a stable name, a verdict, the reason in words, and what a person can do about it.

Invariant: making a verdict never raises. A check whose own code fails refuses and says so: what could not be looked at
must not be moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from snapshotd.api.snapshotd_pb2 import Check

P = ParamSpec("P")

log = logging.getLogger(__name__)

RETRY = "try again; if it stays, report it with the daemon's log"


def plain(text: str) -> str:
    """Text that a protobuf string can hold: names of files and processes are bytes of any kind."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def passed(name: str, reason: str) -> Check:
    return Check(name=name, verdict=Check.PASS, reason=plain(reason))


def warned(name: str, reason: str, remedy: str) -> Check:
    return Check(name=name, verdict=Check.WARN, reason=plain(reason), remedy=plain(remedy))


def refused(name: str, reason: str, remedy: str) -> Check:
    return Check(name=name, verdict=Check.REFUSE, reason=plain(reason), remedy=plain(remedy))


def listed(items: Sequence[str], limit: int = 5) -> str:
    """The first few of many, and how many more there are: a reason is read by a person."""
    shown = "; ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown}; and {len(items) - limit} more"


def guarded(name: str, check: Callable[P, Check], *args: P.args, **kwargs: P.kwargs) -> Check:
    """The check's verdict, or a refusal that says why it could not be reached."""
    try:
        return check(*args, **kwargs)
    except (FileNotFoundError, ProcessLookupError) as error:
        return refused(name, f"a process or file vanished while it was looked at ({error})", RETRY)
    except Exception as error:  # a defect in a check must not cost more than that check
        log.exception("preflight check %s failed", name)
        return refused(name, f"the check itself failed: {type(error).__name__}: {error}", RETRY)


def refusals(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.verdict == Check.REFUSE]
