"""Reserves host memory for the driver's checkpoint, which copies device memory into the process's own memory.

Invariant: it is reserved before the job stands still. What the processes have taken of it since the checkpoint began does not
count any more, and nothing counts once the checkpoint has been made or the move is being undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from snapshotd.api.errors import Full, RankGone, Where
from snapshotd.moves.node import Node
from snapshotd.proc.memory import memory_room
from snapshotd.proc.room import RESERVE_BYTES, mib
from snapshotd.proc.sizes import resident_bytes
from snapshotd.proc.tree import Process

_REMEDY = "free memory, raise the job's memory limit, or let the job keep less on the GPU"


def reserve(node: Node, move: str, pid: int, size_bytes: int, why: str, where: Where) -> None:
    """Reserves it. Blocking. Idempotent: the last call wins. Raises Full when the job's memory limits, or what is free here,
    leave too little. `why`: why the driver's checkpoint has to carry that much."""
    try:
        whose, room = memory_room(pid)[0]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise RankGone(f"process {pid} has ended", where=Where.UNKNOWN) from error
    needs = f"{why} the driver's checkpoint needs {size_bytes >> 20} MiB of host memory"
    if room < size_bytes + RESERVE_BYTES:
        raise Full(f"{needs} where {whose} leaves {room >> 20} MiB", remedy=_REMEDY, where=where)
    purpose = _purpose(move)
    with node.room.turn():
        free = node.room.free(without=purpose, own_groups=False)  # the job's cgroups are charged with it
        if free.bytes < size_bytes + RESERVE_BYTES:
            kept = f"and {mib(RESERVE_BYTES)} must stay free"
            raise Full(f"{needs}, {kept}: {free}", remedy=_REMEDY, where=where)
        node.room.count(purpose, lambda: size_bytes)


def begins(node: Node, move: str, processes: Sequence[Process]) -> None:
    """The checkpoint of these processes begins: what they grow by from now on is no longer free, and must not count twice."""
    before_bytes = _resident_bytes(processes)
    node.room.shrink(_purpose(move), lambda: _resident_bytes(processes) - before_bytes)


def give_up(node: Node, move: str) -> None:
    """The checkpoint was made, or the move is being undone. Idempotent."""
    node.room.give_up(_purpose(move))


def _resident_bytes(processes: Sequence[Process]) -> int:
    found = 0
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += resident_bytes(process.pid)
    return found


def _purpose(move: str) -> str:
    return f"checkpoint of {move}"
