"""The NCCL part of a copy that is held on its target: it takes part in building the communicators before COMMIT.

For that, and only for that, the processes that had communicators are continued, and no thread of the job with them: those are
parked by the shim since before the dump, and the other processes of the tree stay stopped. Afterwards all of it is stopped
and frozen again. Invariant: nothing here releases a parked thread.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from snapshotd.api.errors import NcclFailed, Where
from snapshotd.inprocess import ncclctl, shimctl
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.record import NcclProcess
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread

STOP_S = 10.0
FRESH_S = 30.0


def processes(members: Iterable[NcclProcess]) -> list[Process]:
    return [one.process for one in members]


async def wake_shim(move_log: MoveLog) -> list[Process]:
    """The shim's threads of the held copy run, with a copy of NCCL that knows this host. Repeatable."""
    members = move_log.record.nccl_processes
    await in_thread(Cgroup(Path(move_log.record.cgroup)).thaw, STOP_S)  # everything is stopped by signal as well
    await all_at_once(_wake_one, members)
    return processes(members)


def _wake_one(member: NcclProcess) -> None:
    process = member.process
    mailbox = shimctl.find(process)
    if mailbox is None or not mailbox.state().parked:
        raise NcclFailed(
            f"the threads of the restored process {process.pid} are not parked: it stays stopped",
            where=Where.SOURCE_FROZEN,
        )
    process.signal(signal.SIGCONT)
    if ncclctl.read(process).instance == member.instance:
        ncclctl.load_fresh(process, FRESH_S)


async def still(move_log: MoveLog) -> None:
    """The held copy stands still again, all of it. Repeatable."""
    try:
        await in_thread(tree.stop_again, processes(move_log.record.nccl_processes), STOP_S)
    finally:
        await in_thread(Cgroup(Path(move_log.record.cgroup)).freeze, STOP_S)


async def open_gates(members: Iterable[NcclProcess]) -> None:
    """COMMIT stands and the copy runs: so do its communicators."""
    alive = [process for process in processes(members) if process.alive()]
    await all_at_once(ncclctl.open_gate, alive)
