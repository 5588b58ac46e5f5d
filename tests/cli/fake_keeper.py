"""Replaces the keeper of `migrator run`, and records what it was asked to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from migrator.cli import run
from shim.keeper.library import Library


class Kept:
    """Replaces the keeper and records what it was asked to start."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str, int, str, bool]] = []

    def run(
        self,
        argv: list[str],
        job: str,
        rank: int,
        keeper_sock: str,
        *,
        environment: Mapping[str, str],
        preload: Library | None,
        alone: bool,
        allow_unprotected: bool,
        companion: Callable[[str], Sequence[str]] | None = None,
        replayed: str = "",
    ) -> int:
        self.asked.append((argv, job, rank, keeper_sock, preload is not None))
        self.preload, self.allow_unprotected = preload, allow_unprotected
        self.companion, self.replayed = companion, replayed
        self.environment = dict(environment)
        return 7


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    for name in (
        *run.RANK_VARIABLES,
        "SLURM_JOB_ID",
        "SLURM_JOB_NAME",
        "TORCHELASTIC_RUN_ID",
        "SNAPSHOTD_KEEPER_SOCKET",
        "MIGRATOR_JOB",
        "PYTHON_EXEC",
    ):
        monkeypatch.delenv(name, raising=False)
    stand_in = Kept()
    monkeypatch.setattr("shim.keeper.start.run", stand_in.run)
    return stand_in
