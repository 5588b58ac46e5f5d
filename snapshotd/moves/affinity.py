"""The CPUs on which the threads of a rank may run, which criu does not carry.

A thread keeps its CPUs by their numbers, as far as the target has them. But launchers bind a rank to the CPUs near its GPU.
Such a thread is bound to the CPUs near the GPU that it has now: to all of them if it had all, else to those in the same
positions. A rank whose threads were bound to nothing is bound to nothing. All functions block.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Set

from snapshotd.proc import status
from snapshotd.proc.files import GONE

#: No kernel has more.
_MAX_CPUS = 8192


def read(pids: Iterable[int]) -> dict[int, list[int]]:
    """Of each thread, by its id in the rank's own pid namespace."""
    found: dict[int, list[int]] = {}
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found[status.read(pid, int(thread)).inner_pid] = sorted(os.sched_getaffinity(int(thread)))
    return found


def restore(
    pids: Iterable[int],
    affinity: Mapping[int, list[int]],
    everywhere: Set[int],
    near_there: Set[int],
    near_here: Set[int],
) -> None:
    """`affinity` is what `read` found on the source, `everywhere` all CPUs there, `near_there` and `near_here` those near the
    rank's GPUs."""
    here = os.sched_getaffinity(0)
    if len(near_there) > _MAX_CPUS:  # from another node: it costs time for each thread
        near_there = set()
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*GONE):  # a thread of the CUDA driver may end
                had = set(affinity.get(status.read(pid, int(thread)).inner_pid, ()))
                if had and had != everywhere and (cpus := translated(had, everywhere, near_there, near_here) & here):
                    os.sched_setaffinity(int(thread), cpus)


def translated(had: Set[int], everywhere: Set[int], near_there: Set[int], near_here: Set[int]) -> set[int]:
    """The CPUs of a thread on the target."""
    there = sorted(near_there & everywhere)
    if not had <= set(there) or set(there) == everywhere or not near_here:
        return set(had)  # not bound to the GPU's socket, or the source has only one
    here = sorted(near_here)
    if had == set(there):
        return set(here)
    position = {cpu: index for index, cpu in enumerate(there)}
    return {here[position[cpu] % len(here)] for cpu in had}
