"""Which device memory that processes share (CUDA IPC) can move with a rank: what the shim backs, if all who share it move.

A job shares and closes memory while it is looked at. Invariant: no reason is given that was only true for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from snapshotd.inprocess.abi import SERVERS_MAX
from snapshotd.preflight.verdict import listed

_OTHERWISE = (
    "pass tensors between processes in host memory (`tensor.cpu()` before a multiprocessing queue) and start the job again; a"
    " program that shares no events can free and close what it shared instead"
)
_START = "start the job with `migrator run --device-memory shared`"
#: How often, and how long after, a job is looked at again that seems to have opened what it is just opening.
LOOKS, LOOK_AGAIN_S = 5, 0.05


class Sharing(Protocol):
    """The part of a process's ShimState that is used here."""

    @property
    def exports(self) -> int: ...
    @property
    def imports(self) -> int: ...
    @property
    def moving_exports(self) -> int: ...
    @property
    def moving_imports(self) -> int: ...
    @property
    def server(self) -> int: ...
    @property
    def opened_from(self) -> tuple[int, ...]: ...
    @property
    def shared_outside(self) -> bool: ...


Shared = Sequence[tuple[str, Sharing]]


class Stuck(NamedTuple):
    """Why the memory that the processes of a rank share cannot move with it."""

    reason: str
    remedy: str


def why_not(shared: Shared) -> Stuck | None:
    """None if it can, or if nothing is shared. `shared`: all processes of a rank."""
    sharers = [(name, state) for name, state in shared if state.exports or state.imports]
    if not sharers:
        return None
    counts = [f"{name}: {state.exports} handles exported, {state.imports} opened" for name, state in sharers]
    if crowded := [name for name, state in sharers if _is_full(state)]:
        return Stuck(
            f"processes have opened device memory (CUDA IPC) of more than {SERVERS_MAX} others: {listed(crowded)}",
            _OTHERWISE,
        )
    differ = [(state.exports, state.imports) != (state.moving_exports, state.moving_imports) for _, state in sharers]
    if any(differ):
        stuck = [text for text, other in zip(counts, differ, strict=True) if other]
        return Stuck(
            f"the rank shares device memory between processes (CUDA IPC) that does not move with it: {listed(stuck)}",
            f"{_START}, without torch's expandable segments and in blocks of 1 MiB and more; or {_OTHERWISE}",
        )
    if outside := [name for name, state in sharers if state.shared_outside]:
        return Stuck(
            f"processes that are not in the rank have opened its device memory (CUDA IPC): {listed(outside)}",
            _OTHERWISE,
        )
    servers = {state.server for _, state in sharers if state.exports}
    if guests := [name for name, state in sharers if state.imports and set(state.opened_from) - servers]:
        return Stuck(
            f"opened device memory (CUDA IPC) is of processes that are not in the rank, or have ended: {listed(guests)}",
            _OTHERWISE,
        )
    return None


def _is_full(state: Sharing) -> bool:
    """Whether its shim has no place for another process."""
    return len(state.opened_from) >= SERVERS_MAX and state.imports != state.moving_imports


def lasting(read: Callable[[], Shared]) -> tuple[Stuck | None, Shared]:
    """The same about a rank that runs, and what was read last. Its counts are read one after the other, and change meanwhile:
    a reason counts if it is there every time. Blocking."""
    shared = read()
    for _ in range(LOOKS - 1):
        if why_not(shared) is None:
            break
        time.sleep(LOOK_AGAIN_S)
        shared = read()
    return why_not(shared), shared
