"""Undoes what a daemon that is about to stop has in progress, so that no rank stays frozen until its next start."""

from __future__ import annotations

import asyncio
import contextlib

from snapshotd.api.errors import SnapshotError
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.source.steps import SourceSteps

#: How long other nodes have to learn that the suspension of a job whose record is here was undone. Their ranks are frozen
#: until then, and cannot learn it before the next start of this daemon.
LEARN_S = 5.0


async def undo_all(source: SourceSteps, jobs: JobSteps) -> None:
    """Aborts every record and every move without an outcome. Records of jobs first: ranks with a whole image, here and on
    other nodes, are thawed only if the record says so."""
    undone = [record for record in list(jobs.moves.values()) if record.log.outcome is None]
    for record in undone:
        with contextlib.suppress(SnapshotError):
            await jobs.abort(record.log.move, "the coordinator's daemon was stopped", "coordinator")
    for moving in list(source.moves.values()):
        if moving.log.outcome is None:
            with contextlib.suppress(SnapshotError):
                await source.abort(moving.log.move, "the source daemon was stopped", "source")
    if carried_out := [record.settling for record in undone if record.settling is not None]:
        await asyncio.wait(carried_out, timeout=LEARN_S)
