"""Wakes an activated copy."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from snapshotd.moves.device import sharing, standstill
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.nccl import held_copy
from snapshotd.moves.peers import connections, socket_options
from snapshotd.moves.rules import Mark
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

WAKE_S = 20.0
_resuming: set[asyncio.Task[None]] = set()


async def wake(move_log: MoveLog) -> None:
    """Lets an activated copy run: admits its packets, sends SIGCONT, thaws its cgroup so that all processes start at once,
    then releases the threads that were parked for the GPU and opens its gates. Idempotent."""
    known = await in_thread(move_log.whole)
    group = Cgroup(Path(known.cgroup))
    with span("socket options"):
        problems = await in_thread(socket_options.put_back, group.pids(), known.socket_options)
    for problem in problems:
        log.warning("a socket of rank %s differs from before: %s", move_log.begin.rank, problem)
    with span("drop filter"):
        await in_thread(connections.let_go, move_log)
    with span("thaw"):
        await in_thread(tree.continue_all, group, known.stopped_before or [])
        await in_thread(group.thaw, WAKE_S)
    parked = standstill.parked_ones(known.cuda, held_copy.processes(known.nccl_processes))
    try:  # it is open since the restore, unless something has closed it since
        await in_thread(sharing.reopen, [process for process in known.cuda if process.alive()])
    except Lost as lost:
        log.error("rank %s was ended: %s", move_log.begin.rank, lost)
        await in_thread(group.kill, WAKE_S)
        return
    await standstill.let_go([process for process in parked if process.alive()])
    if known.nccl_processes and not known.gates_opened:
        await held_copy.open_gates(known.nccl_processes, abandon=known.abandoned)
        await in_thread(move_log.mark, Mark.ACTIVATED, gates_opened=True)
    if timers := known.socket_options.timers:
        task = asyncio.create_task(in_thread(socket_options.resume_there, group.pids(), timers))
        _resuming.add(task)
        task.add_done_callback(_resuming.discard)


def asleep(move_log: MoveLog, group: Cgroup) -> bool:
    """Whether something of an activated copy is still frozen, parked, or behind a closed gate. Blocking."""
    known = move_log.whole()
    parked = standstill.parked_ones(known.cuda, held_copy.processes(known.nccl_processes))
    return group.frozen() or standstill.parked(parked) or bool(known.nccl_processes and not known.gates_opened)
