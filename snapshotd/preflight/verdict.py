"""The result of a check: a stable name, a verdict, the reason, and what the operator can do about it.

Invariant: making a verdict never raises. A check whose own code fails refuses with that reason: what could not be
examined must not be moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from snapshotd.api.errors import Timeout
from snapshotd.api.snapshotd_pb2 import Check

P = ParamSpec("P")

log = logging.getLogger(__name__)

RETRY = "retry; if it happens again, report it together with the daemon's log"


def plain(text: str) -> str:
    """Text that a protobuf string can hold: names of files and processes can contain any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def passed(name: str, reason: str) -> Check:
    return Check(name=name, verdict=Check.PASS, reason=plain(reason))


def warned(name: str, reason: str, remedy: str) -> Check:
    return Check(name=name, verdict=Check.WARN, reason=plain(reason), remedy=plain(remedy))


def refused(name: str, reason: str, remedy: str) -> Check:
    return Check(name=name, verdict=Check.REFUSE, reason=plain(reason), remedy=plain(remedy))


def listed(items: Sequence[str], limit: int = 5) -> str:
    """The first few items, and how many more there are."""
    shown = "; ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown}; and {len(items) - limit} more"


def guarded(name: str, check: Callable[P, Check], *args: P.args, **kwargs: P.kwargs) -> Check:
    """The check's verdict, or a refusal if the check itself failed."""
    try:
        return check(*args, **kwargs)
    except (FileNotFoundError, ProcessLookupError) as error:
        return refused(name, f"a process ended, or a file was removed, during the check ({error})", RETRY)
    except Timeout as error:
        return refused(name, error.message, "find out why that file system does not answer, then retry")
    except Exception as error:  # a defect in one check must not stop the others
        log.exception("preflight check %s failed", name)
        return refused(name, f"the check itself failed: {type(error).__name__}: {error}", RETRY)


def refusals(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.verdict == Check.REFUSE]
