"""Which device memory that processes share (CUDA IPC) can move with a rank: what the shim backs, if all who share it move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from snapshotd.preflight.verdict import listed

REMEDY = (
    "pass tensors between processes in host memory (`tensor.cpu()` before a multiprocessing queue) and start the job again;"
    " a program that has exported what is not its own memory can free and close it instead"
)


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


def why_not(shared: Sequence[tuple[str, Sharing]]) -> str:
    """Why the memory that these processes, all of a rank, share cannot move with it; "" if it can."""
    stuck = [
        f"{name}: {state.exports} handles exported, {state.imports} opened"
        for name, state in shared
        if (state.exports, state.imports) != (state.moving_exports, state.moving_imports)
    ]
    if stuck:
        return f"the rank shares device memory between processes (CUDA IPC) that only CUDA knows: {listed(stuck)}"
    servers = {state.server for _, state in shared if state.exports}
    guests = [name for name, state in shared if state.imports and set(state.opened_from) - servers]
    if guests:
        return (
            f"opened device memory (CUDA IPC) is of processes that are not in the rank, or have ended: {listed(guests)}"
        )
    return ""
