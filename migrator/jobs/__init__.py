"""Suspends, resumes and snapshots whole jobs: executes the tables of `migrator/job_protocol.py` against real daemons.

Invariant: nothing is decided here. The coordinator's record decides, and the daemons act on it without this program too.
`walk.py` goes through a table and ends an attempt that failed, `suspend.py`, `snapshot.py` and `resume.py` have one function
per step, `connections.py` checks that a job is connected with itself alone, `buddies.py` chooses who keeps copies of a
snapshot, `rollback.py` brings a job back to one, `places.py` says from which copy, `finding.py` finds jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from migrator.cluster import Cluster
from migrator.find_rank import Found
from migrator.job_results import JobOptions, JobResult
from migrator.jobs.finding import find_running, find_suspended, must_be_same, snapshot_of
from migrator.jobs.resume import bring_back
from migrator.jobs.rollback import rollback
from migrator.jobs.snapshot import Snapshot
from migrator.jobs.succession import hand_over
from migrator.jobs.suspend import Suspension
from migrator.jobs.walk import drive
from migrator.results import Event

__all__ = ["resume", "rollback", "snapshot", "suspend"]


async def suspend(cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
    """Suspends a job. If it is cancelled before COMMIT, all ranks go on; after COMMIT it is finished.

    Raises only for what is wrong before a daemon was asked to change anything. Every later failure is in the result."""
    found, warnings = await find_running(cluster, options.job, options.user_id, hurries=True)
    must_be_same(options, found)
    coordinator, _ = await _coordinator(cluster, found)
    run = Suspension(cluster, options, found, coordinator, on_event)
    run.warnings += warnings
    return await drive(run)


async def snapshot(cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
    """Takes a snapshot of a job, whose ranks go on. If it is cancelled before COMMIT, the snapshot before it is kept."""
    found, warnings = await find_running(cluster, options.job, options.user_id)
    coordinator, asked_copies = await _coordinator(cluster, found)
    run = Snapshot(cluster, options, found, coordinator, on_event, asked_copies)
    run.warnings += warnings
    return await drive(run)


async def _coordinator(cluster: Cluster, found: Sequence[Found]) -> tuple[str, int]:
    """The node that keeps the job's last snapshot: no other one may suspend it or take the next one. If there is none, the
    node of the lowest rank. A coordinator that has no rank of the job any more hands it over to that one first: it may be
    about to be switched off, and then all ranks would end. Also how many copies were asked for with that snapshot."""
    known = await snapshot_of(cluster, {one.rank.uid for one in found})
    if known is None:
        return found[0].node, 0
    if known.node not in {one.node for one in found}:
        known = await hand_over(cluster, known, found[0].node)
    return known.node, known.record.copies


async def resume(cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
    """Resumes a suspended job. If it is cancelled before COMMIT, the images stay; after COMMIT it is finished."""
    node, record = await find_suspended(cluster, options.job, options.user_id)
    return await bring_back(cluster, options, node, record, on_event)
