"""Runs a command as a rank: makes its home keeper and what runs beside it, and ends as the rank has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from shim.keeper import signals
from shim.keeper.child import rank_environment
from shim.keeper.home import HomeKeeper, say
from shim.keeper.library import Library
from shim.keeper.relay import SUPPRESS


def run(
    argv: Sequence[str],
    job: str,
    rank: int,
    keeper_sock: str,
    *,
    environment: Mapping[str, str] | None = None,
    preload: Library | None = None,
    alone: bool = False,
    allow_unprotected: bool = False,
    companion: Callable[[str], Sequence[str]] | None = None,
    replayed: str = SUPPRESS,
) -> int:
    """Runs `argv` as a rank. Returns its exit code, or ends by the signal that ended the rank.

    `preload`: the library that is preloaded into it. `alone`: the job has no other rank, and its name may get a suffix.
    `allow_unprotected`: it runs even if the daemon cannot talk to that library. `companion`: what runs beside the rank.
    `replayed`: what is done with output that it prints again after a rollback."""
    made = rank_environment(environment or os.environ, preload.path if preload is not None else None)
    keeper = HomeKeeper(argv, job, rank, keeper_sock, made, alone, preload, allow_unprotected)
    keeper.set_replayed(replayed)
    if companion is not None:
        from shim.keeper.companion import Companion  # not for every rank

        keeper.companion = Companion(companion, lambda: keeper.loop, say)
    try:
        keeper.loop.run()
    finally:
        if keeper.companion is not None:
            keeper.companion.end()
        keeper.leave_terminal()
    status = keeper.final_status
    if os.WIFSIGNALED(status):
        signals.die_of(os.WTERMSIG(status))
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)
