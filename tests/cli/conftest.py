"""The fixtures of the tests of `migrator`: a cluster of fake daemons, and the program.

Invariant: no test can reach a cluster, a lab or a daemon that exists on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from migrator import find_rank
from migrator.cli import main
from snapshotd.api import snapshotd_pb2 as pb
from tests.cli.fake_daemon import FakeCluster, FakeDaemon

MOVE = "m-0123456789ab"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sure that a test that names no cluster finds none, even if this machine has one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MIGRATOR_CLUSTER", str(tmp_path / "no-cluster.toml"))
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("MIGRATOR_DEBUG", "MIGRATOR_PKI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    made = FakeCluster(tmp_path / "cluster.toml")
    for node in ("node-1", "node-2", "spare-1"):
        made.serve(FakeDaemon(node))
    monkeypatch.setenv("MIGRATOR_CLUSTER", str(made.path))
    monkeypatch.setattr(find_rank, "ASK_TIMEOUT_S", 60.0)  # the daemons of a busy machine may take long
    yield made
    made.stop(*made.servers)


@dataclass(frozen=True)
class Ran:
    """The result of a run of the program."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout, which must be exactly one JSON object on one line."""
        assert self.out.count("\n") == 1, self.out
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


class Migrator:
    """The program, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> Ran:
        self._capsys.readouterr()
        try:
            code = main(argv)
        except SystemExit as end:  # argparse's --help
            code = int(end.code or 0)
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)


@pytest.fixture
def migrator(capsys: pytest.CaptureFixture[str]) -> Migrator:
    return Migrator(capsys)


def a_rank(node: str, rank: int = 0, job: str = "train", **fields: Any) -> pb.Rank:
    """A rank that runs on `node`, which is its home."""
    given: dict[str, Any] = {
        "uid": f"{job}-{rank}-00000001",
        "job": job,
        "rank": rank,
        "place": pb.Rank.HERE,
        "at_node": node,
        "home_node": node,
        "process": pb.ProcessId(pid=4711, start_ticks=1),
        "command": "python train.py",
        "memory_bytes": 1_500_000_000,
    }
    return pb.Rank(**(given | fields))


def a_record(role: str, move: str = MOVE, **fields: Any) -> pb.MoveRecord:
    """The source's or target's record of a move of rank 1 from node-1 to spare-1 that has not ended."""
    given: dict[str, Any] = {
        "move": move,
        "role": role,
        "rank_uid": "train-1-00000001",
        "job": "train",
        "rank": 1,
        "source_node": "node-1",
        "target_node": "spare-1",
        "mark": "streamed" if role == "source" else "held",
        "begun_unix_s": 1000.0,
        "where": "frozen on source" if role == "source" else "unknown",
        "waiting_for": "the driver decides" if role == "source" else "only the source knows how this ends",
    }
    return pb.MoveRecord(**(given | fields))


CHANGING = ("Abort", "Release", "Activate", "Discard", "DeclareTargetDead", "DeclareMemberDead", "DeclareSourceDead")


@pytest.fixture
def halfway(cluster: FakeCluster) -> FakeCluster:
    """A move of rank 1 from node-1 to spare-1 that is streamed and held, but not decided."""
    cluster["node-1"].moves = [a_record("source")]
    cluster["spare-1"].moves = [a_record("target")]
    return cluster


def changes(cluster: FakeCluster) -> dict[str, list[str]]:
    return {node: calls for node, daemon in cluster.daemons.items() if (calls := daemon.called(*CHANGING))}
