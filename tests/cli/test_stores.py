"""The store of a protected job that torchrun starts: rank 0 hosts it, on a port that all ranks know."""

from __future__ import annotations

import socket

import pytest

from migrator.cli import run, stores
from tests.cli.conftest import Migrator
from tests.cli.fake_keeper import Kept, kept

__all__ = ["kept"]

#: As torchrun starts a worker with --master-port 29500.
WORKER = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "29500", "RANK": "1"}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("migrator.cli.launchers.worker_python", lambda environment, parent: "python")
    monkeypatch.delenv("MIGRATOR_PROTECT", raising=False)
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_every_port_has_another_one_of_its_own() -> None:
    made = [stores.port_for(port) for port in range(25_000, 35_000)]
    assert len(set(made)) == len(made)
    assert all(1024 < own < 32768 for own in made)
    assert all(stores.port_for(port) != port for port in range(1, 65_536))


def test_ranks_of_a_protected_job_use_a_store_of_rank_0(
    kept: Kept, migrator: Migrator, worker: pytest.MonkeyPatch
) -> None:
    migrator("run", "--worker", "--", "train.py")
    assert {name: kept.environment[name] for name in WORKER} == WORKER, "a job that is not protected is left alone"
    worker.setenv("MIGRATOR_PROTECT", "5m")
    migrator("run", "--worker", "--", "train.py")
    assert kept.environment[stores.LAUNCHER_HOSTS] == "False"
    assert kept.environment[stores.PORT] == "24500"


@pytest.mark.parametrize("changed", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"MASTER_PORT": "auto"}])
def test_where_the_launcher_has_no_store_nothing_is_changed(changed: dict[str, str]) -> None:
    before = {**WORKER, **changed}
    assert stores.of_rank_0(before, 0) == before


def test_rank_0_says_that_the_port_is_in_use(kept: Kept, migrator: Migrator, worker: pytest.MonkeyPatch) -> None:
    worker.setenv("MIGRATOR_PROTECT", "5m")
    worker.setenv("RANK", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        worker.setattr(stores, "port_for", lambda port: number)
        said = migrator("run", "--worker", "--", "train.py")
        assert (said.code, kept.asked) == (run.FAILED, [])
        assert "is in use" in said.err
        assert "choose another --master-port" in said.err
        worker.setenv("RANK", "1")  # it does not listen
        migrator("run", "--worker", "--", "train.py")
        assert len(kept.asked) == 1
