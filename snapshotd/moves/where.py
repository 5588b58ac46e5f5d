"""Derives where a rank is from one daemon's journal."""

from __future__ import annotations

from snapshotd.api.errors import Where
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.rules import Mark


def where_of(log: MoveLog) -> Where:
    match log.begin.role:
        case "source":
            return _on_source(log)
        case "target":
            return _on_target(log)
        case _:
            return Where.UNKNOWN  # peers and gates do not have the rank


def _on_source(log: MoveLog) -> Where:
    if log.begin.kind == "snapshot" and (log.outcome is not None or log.known.continued):
        return Where.SOURCE_RUNNING
    if log.committed and log.begin.coordinator:
        return Where.SUSPENDED
    if log.committed:
        return Where.TARGET_RUNNING if log.last_mark is Mark.SETTLED else Where.TARGET_HELD
    if log.outcome is not None or log.last_mark is Mark.BEGUN:
        return Where.SOURCE_RUNNING
    return Where.SOURCE_FROZEN


def _on_target(log: MoveLog) -> Where:
    if log.begin.kind == "copy":
        return Where.SOURCE_RUNNING
    if log.begin.coordinator and log.last_mark not in {Mark.ACTIVATED, Mark.HELD}:
        return Where.SUSPENDED  # its image stays on the node that has it
    match log.last_mark:
        case Mark.ACTIVATED:
            return Where.TARGET_RUNNING
        case Mark.HELD:
            return Where.TARGET_HELD
        case Mark.DISCARDED:
            return Where.SOURCE_RUNNING
        case _ if log.aborted:
            return Where.SOURCE_RUNNING
        case Mark.PREPARED:
            return Where.UNKNOWN  # the source freezes the rank some time between this and SEALED
        case _:
            return Where.SOURCE_FROZEN
