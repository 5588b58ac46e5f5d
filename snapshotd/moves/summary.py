"""Defines what stays in memory of a move that has ended: a history has thousands of them, and a daemon's memory must not grow
with it. Everything else is read from the disk when it is asked for.

No I/O here.
"""

from __future__ import annotations

import sys

import msgspec

from snapshotd.moves.record import Begin, MoveRecord, OutcomeRecord
from snapshotd.moves.rules import Mark
from snapshotd.proc.tree import Process

#: Texts that are the same in many moves.
_SHARED = ("role", "rank_uid", "job", "source_node", "source_endpoint", "target_node", "target_endpoint", "boot_id")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Those fields of a MoveRecord that are asked for again and again."""

    mark: Mark | None
    marked_unix_s: float
    pid: int
    start_ticks: int
    new_connections_held: bool
    sent_bytes: int
    handed_over_bytes: int
    pause_s: float
    predicted_s: float
    failure: str
    abandoned: bool
    continued: bool
    resumed_node: str

    @classmethod
    def of(cls, record: MoveRecord) -> Summary:
        return cls(**{name: getattr(record, name) for name in cls.__struct_fields__})

    @property
    def root(self) -> Process:
        return Process(self.pid, self.start_ticks)


def begin_of(begin: Begin) -> Begin:
    """The same, with texts that are shared with those of other moves."""
    return msgspec.structs.replace(begin, **{name: sys.intern(str(getattr(begin, name))) for name in _SHARED})


def outcome_of(outcome: OutcomeRecord) -> OutcomeRecord:
    """The same, with texts that are shared with those of other moves."""
    texts = {name: sys.intern(str(getattr(outcome, name))) for name in ("reason", "decided_by")}
    return msgspec.structs.replace(outcome, **texts)
