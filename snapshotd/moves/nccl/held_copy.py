"""Lets a copy that is held on its target take part in building the communicators before COMMIT.

Only for that, the processes that had communicators are continued. No thread of the job runs: the shim has parked them since
before the dump. The other processes of the tree stay stopped. If it fails, the whole copy is stopped and frozen again. Once
the communicators are built, NCCL's own threads go on until the copy is activated or dropped: a member has its result before
its threads have sent everything that other members wait for. Invariant: nothing here releases a parked thread.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from snapshotd.api.errors import NcclFailed, Where
from snapshotd.inprocess import ncclctl, shimctl
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.record_parts import NcclProcess
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread

STOP_S = 10.0
FRESH_S = 30.0


def processes(members: Iterable[NcclProcess]) -> list[Process]:
    return [one.process for one in members]


async def wake_shim(move_log: MoveLog) -> list[Process]:
    """Lets the shim's threads of the held copy run, and loads a fresh NCCL that has not seen another host. Idempotent."""
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
    """Stops and freezes the whole held copy again. Idempotent."""
    try:
        await in_thread(tree.stop_again, processes(move_log.record.nccl_processes), STOP_S)
    finally:
        await in_thread(Cgroup(Path(move_log.record.cgroup)).freeze, STOP_S)


async def open_gates(members: Iterable[NcclProcess], *, abandon: bool) -> None:
    """COMMIT stands and the copy runs: lets it use its communicators. Abandon: they can never be built again."""
    alive = [process for process in processes(members) if process.alive()]
    await all_at_once(lambda process: ncclctl.open_gate(process, abandon=abandon), alive)
