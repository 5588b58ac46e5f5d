"""Tests what `migrator check` shows, and which ranks and targets it rejects."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, Busy, NotFound, Refused
from tests.cli.conftest import MOVE, Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster


def _checks() -> list[pb.Check]:
    return [
        pb.Check(name="kernel", reason="6.18 on both"),
        pb.Check(name="time", verdict=pb.Check.WARN, reason="clocks differ by 3 s", remedy="run chrony"),
        pb.Check(name="sockets", verdict=pb.Check.REFUSE, reason="2 TCP sockets", remedy="close them"),
    ]


def test_check_shows_each_check_and_exits_with_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].checks = _checks()
    ran = migrator("check", "--rank", "0", "--to", "spare-1")
    assert ran.code == Refused.exit_code
    assert "rank 0 of job train: node-1 → spare-1" in ran.out
    assert "✓ kernel   6.18 on both" in ran.out
    assert "! time     clocks differ by 3 s" in ran.out
    assert "✗ sockets  2 TCP sockets" in ran.out
    assert "remedy: close them" in ran.out
    result = migrator("check", "--rank", "0", "--to", "spare-1", "--json")
    assert result.code == Refused.exit_code
    assert result.json["movable"] is False
    assert [check["verdict"] for check in result.json["checks"]] == ["pass", "warn", "refuse"]


def test_check_without_a_refusal_exits_with_0(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].checks = _checks()[:2]
    ran = migrator("check", "--rank", "0", "--to", "spare-1")
    assert ran.code == 0
    assert "the rank can move" in ran.out


@pytest.mark.parametrize("verb", ["check", "move"])
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--rank", "5", "--to", "spare-1"), NotFound),
        (("--rank", "0", "--to", "spare-9"), NotFound),
        (("--rank", "0", "--to", "spare-1", "--job", "other"), NotFound),
        (("--rank", "0", "--to", "node-1"), Refused),
        (("--rank", "1", "--to", "spare-1"), Ambiguous),
        (("--rank", "2", "--to", "spare-1"), Busy),
    ],
    ids=["no such rank", "no such node", "no such job", "to itself", "two jobs", "already moving"],
)
def test_unsuitable_rank_or_target_is_rejected_before_anything_changes(
    cluster: FakeCluster,
    migrator: Migrator,
    verb: str,
    argv: tuple[str, ...],
    expected: type[NotFound | Refused | Ambiguous | Busy],
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", 0), a_rank("node-1", 1), a_rank("node-1", 2, moving=MOVE)]
    cluster["node-2"].ranks = [a_rank("node-2", 1, job="other")]
    ran = migrator(verb, *argv, "--json")
    assert (ran.code, ran.json["error"]) == (expected.exit_code, expected.code)
    assert not any(daemon.called("Prepare", "Begin", "Freeze") for daemon in cluster.daemons.values())
