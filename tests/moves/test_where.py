"""Where the rank is, as one daemon's journal shows it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from snapshotd.api.errors import Where
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.where import where_of

MOVE = "m-0123456789ab"


def begin(role: str) -> Begin:
    return Begin(MOVE, role, "job-0-x", "job", 0, "node-1", "a:1", "spare-1", "b:1", "ab" * 32, "boot", 1.0, 30.0)


@pytest.mark.parametrize(
    ("role", "mark", "outcome", "where"),
    [
        ("source", Mark.BEGUN, None, Where.SOURCE_RUNNING),
        ("source", Mark.FREEZING, None, Where.SOURCE_FROZEN),
        ("source", Mark.STREAMED, Outcome.ABORT, Where.SOURCE_RUNNING),
        ("source", Mark.STREAMED, Outcome.COMMIT, Where.TARGET_HELD),
        ("source", Mark.SETTLED, Outcome.COMMIT, Where.TARGET_RUNNING),
        ("target", Mark.PREPARED, None, Where.UNKNOWN),  # the source may not have begun, or be streaming
        ("target", Mark.PREPARED, Outcome.ABORT, Where.SOURCE_RUNNING),
        ("target", Mark.SEALED, None, Where.SOURCE_FROZEN),
        ("target", Mark.RESTORING, None, Where.SOURCE_FROZEN),
        ("target", Mark.HELD, None, Where.TARGET_HELD),
        ("target", Mark.ACTIVATED, Outcome.COMMIT, Where.TARGET_RUNNING),
        ("target", Mark.DISCARDED, Outcome.ABORT, Where.SOURCE_RUNNING),
        ("peer", Mark.REPOINTED, None, Where.UNKNOWN),
    ],
)
def test_where_follows_the_journal(
    tmp_path: Path, role: str, mark: Mark, outcome: Outcome | None, where: Where
) -> None:
    log = Journal(tmp_path).begin(begin(role))
    log.mark(mark)
    if outcome is not None:
        log.decide(outcome, "a test", "source")
    assert where_of(log) is where


@pytest.mark.parametrize(
    ("role", "mark", "outcome", "where"),
    [
        ("source", Mark.STREAMED, None, Where.SOURCE_FROZEN),
        ("source", Mark.SETTLED, Outcome.COMMIT, Where.SUSPENDED),
        ("target", Mark.PREPARED, None, Where.SUSPENDED),
        ("target", Mark.SEALED, None, Where.SUSPENDED),
        ("target", Mark.HELD, None, Where.TARGET_HELD),
        ("target", Mark.ACTIVATED, Outcome.COMMIT, Where.TARGET_RUNNING),
        ("target", Mark.DISCARDED, Outcome.ABORT, Where.SUSPENDED),
    ],
)
def test_rank_of_a_job_that_is_resumed_is_suspended_until_it_is_held(
    tmp_path: Path, role: str, mark: Mark, outcome: Outcome | None, where: Where
) -> None:
    log = Journal(tmp_path).begin(msgspec.structs.replace(begin(role), coordinator="m-ba9876543210"))
    log.mark(mark)
    if outcome is not None:
        log.decide(outcome, "a test", "coordinator")
    assert where_of(log) is where
