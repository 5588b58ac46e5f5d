"""Looks for what NCCL has left in a rank's processes after all its communicators were taken down.

`migrator run` leaves NCCL's performance features as the user has them. Some of them may keep a thread, a socket or memory
that cannot be moved, which depends on NCCL's version and on the machine. So nothing is refused for its settings: what is left
decides. Invariant: this runs before anything is frozen, behind closed gates, and changes nothing; if it raises, the move is
undone and the job continues with new communicators.

Memory that only the CUDA driver knows cannot be seen here. If the driver's checkpoint fails, `explained` names the features
that may be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapshotd.api.errors import GpuFailed, Undone, Where
from snapshotd.inprocess import ncclctl
from snapshotd.net.sockets import tree_flows
from snapshotd.preflight.sockets import unix_sockets_of
from snapshotd.proc import comm, environ, fd, host, maps, nccl_ras
from snapshotd.proc.files import GONE
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once

#: NCCL's threads end shortly after the call that destroys a communicator.
LOOK_S, LOOK_EVERY_S = 2.0, 0.03
#: A thread that runs at the moment of a look may or may not be NCCL's. One of NCCL's that is left waits nearly all the time,
#: so a few looks are enough: the job stands still meanwhile.
UNSURE_LOOKS = 3

_SHARED_MEMORY = "/dev/shm/nccl-"
_PROTOCOL = "system.sockprotoname"
_UNIX_SOCKET = re.compile(r"@/?tmp/nccl-socket-")


@dataclass(frozen=True)
class Feature:
    name: str
    setting: str  # switches it off


RAS = Feature("RAS, NCCL's service for diagnosis", "NCCL_RAS_ENABLE=0")
SHARED_MEMORY = Feature("transport through shared memory", "NCCL_SHM_DISABLE=1")
SHARED_HANDLES = Feature("sharing of device memory by handles", "NCCL_CUMEM_ENABLE=0")
UNKNOWN = Feature("feature that is not known here", "")

#: Features whose memory only the driver knows; by the variable that switches one off with 0.
DRIVER_MEMORY = {"NCCL_NVLS_ENABLE": "NVLink SHARP", "NCCL_CUMEM_HOST_ENABLE": "host memory of the CUDA driver"}


@dataclass(frozen=True)
class Left:
    """Something of NCCL in a process."""

    pid: int
    what: str
    feature: Feature

    def __str__(self) -> str:
        return f"process {self.pid} has {self.what} of its {self.feature.name}"


async def must_be_none(processes: Sequence[Process]) -> None:
    """Raises Undone if NCCL has left something in one of these processes. None of them has a communicator that is up."""
    deadline, recent = host.boottime_s() + LOOK_S, deque[list[Left]](maxlen=UNSURE_LOOKS)
    for number in itertools.count(1):
        looks = await all_at_once(look, processes)
        found, unsure = [left for each, _ in looks for left in each], any(unsure for _, unsure in looks)
        if not found and (not unsure or number >= UNSURE_LOOKS):
            return
        recent.append(found)
        if found and host.boottime_s() >= deadline:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    found = list(dict.fromkeys(left for each in recent for left in each))  # a thread that ran is not in every look
    settings = sorted({left.feature.setting for left in found if left.feature.setting})
    how = f"set {' '.join(settings)} for the job, or start it" if settings else "start the job"
    raise Undone(
        f"NCCL did not release everything when its communicators were taken down: {'; '.join(map(str, found[:5]))}",
        remedy=f"{how} with `migrator run --nccl-safe`, which switches off the features of NCCL that may keep something",
        where=Where.SOURCE_RUNNING,
    )


def look(process: Process) -> tuple[list[Left], bool]:
    """What NCCL has left, and whether another look may find more or less. Blocking."""
    pid, report = process.pid, ncclctl.read(process)
    threads = max(0, report.threads - report.ids_unused)  # a unique id that was not used keeps a thread, which moves
    found = [Left(pid, "memory", SHARED_MEMORY)] if _shares_memory(pid) else []
    if any(_UNIX_SOCKET.match(name) for name in _unix_names(pid)):
        found.append(Left(pid, "a Unix socket", SHARED_HANDLES))
    listening = _listens(pid, nccl_ras.port(pid))
    if listening:
        found.append(Left(pid, "a socket", RAS))
    if threads:
        of_ras = listening or "NCCL RAS" in comm.thread_names(pid).values() or nccl_ras.is_on(pid)
        found.append(
            Left(pid, f"{threads} thread{'s' if threads > 1 else ''}", RAS if of_ras else UNKNOWN),
        )
    return found, bool(report.unseen_threads)


def explained(error: GpuFailed, processes: Iterable[Process]) -> GpuFailed:
    """An error of the driver's checkpoint, with the features of NCCL that may be its cause. Blocking."""
    values = [_environment(process.pid) for process in processes if process.alive()]
    on = {name: what for name, what in DRIVER_MEMORY.items() if any(one.get(name) != "0" for one in values)}
    if not on:
        return error
    named = " and ".join(f"{what} ({name})" for name, what in on.items())
    return GpuFailed(
        error.message,
        remedy=f"{error.advice}. The rank uses NCCL with {named}, whose memory the driver may not be able to checkpoint: if"
        " this happens again, start the job with `migrator run --nccl-safe`",
        where=error.where,
    )


def _shares_memory(pid: int) -> bool:
    mapped = any(True for _ in maps.read(pid, (_SHARED_MEMORY,)))
    return mapped or any(link.startswith(_SHARED_MEMORY) for _, link, _ in fd.read_links(pid))


def _unix_names(pid: int) -> list[str]:
    inodes = set()
    for number, link, _ in fd.read_links(pid):
        with contextlib.suppress(OSError):  # closed meanwhile
            if link.startswith("socket:[") and os.getxattr(f"/proc/{pid}/fd/{number}", _PROTOCOL).startswith(b"UNIX"):
                inodes.add(int(link[len("socket:[") : -1]))
    return [name for inode, name in unix_sockets_of(pid).names.items() if inode in inodes] if inodes else []


def _listens(pid: int, port: int) -> bool:
    return any(flow.listens and flow.local.port == port for flow in tree_flows([pid]))


def _environment(pid: int) -> dict[str, str]:
    try:
        return environ.read(pid)
    except GONE:
        return {}
