"""A rank is also named by its id, which is never ambiguous."""

from __future__ import annotations

import pytest

from snapshotd.api.errors import Ambiguous, NotFound, Usage
from tests.cli.conftest import MOVE, Migrator, a_rank, a_record
from tests.cli.fake_daemon import FakeCluster


@pytest.mark.parametrize("verb", ["check", "move"])
def test_rank_that_was_started_twice_is_named_by_its_id(cluster: FakeCluster, migrator: Migrator, verb: str) -> None:
    """Two jobs that are named after the same script, on two nodes."""
    for node, uid in (("node-1", "train-0-0a0b0c0d"), ("node-2", "train-0-0a0b0c0e")):
        cluster[node].ranks = [a_rank(node, uid=uid)]
    ran = migrator(verb, "--rank", "0", "--to", "spare-1")
    assert ran.code == Ambiguous.exit_code
    assert "name one by its id: --rank train-0-0a0b0c0d" in ran.err
    assert migrator(verb, "--rank", "train-0-0a0b0c0e", "--to", "spare-1").code == 0
    asked = {node: len(cluster[node].called("Inspect")) for node in ("node-1", "node-2")}
    assert asked == {"node-1": 0, "node-2": 1}


def test_unknown_or_malformed_id_is_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", uid="train-0-0a0b0c0d")]
    assert migrator("check", "--rank", "train-0-ffffffff", "--to", "spare-1").code == NotFound.exit_code
    assert migrator("check", "--rank", "train-0", "--to", "spare-1").code == Usage.exit_code


def test_ps_shows_the_id_and_takes_it(cluster: FakeCluster, migrator: Migrator) -> None:
    for node, uid in (("node-1", "train-0-0a0b0c0d"), ("node-2", "train-0-0a0b0c0e")):
        cluster[node].ranks = [a_rank(node, uid=uid)]
    shown = migrator("ps").out
    assert "train-0-0a0b0c0d" in shown
    assert "train-0-0a0b0c0e" in shown
    one = migrator("ps", "--rank", "train-0-0a0b0c0e", "--json").json["ranks"]
    assert [rank["node"] for rank in one] == ["node-2"]
    assert len(migrator("ps", "--rank", "0", "--json").json["ranks"]) == 2
    assert migrator("ps", "--rank", "1", "--json").json["ranks"] == []


def test_history_shows_only_moves_of_the_given_rank(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [
        a_record("source", f"m-00000000000{at}", rank_uid=uid, ended_unix_s=2000.0, outcome=2)
        for at, uid in enumerate(("train-1-0a0b0c0d", "train-1-0a0b0c0e"))
    ]
    both = migrator("history", "--job", "train", "--rank", "1", "--json").json["moves"]
    assert len(both) == 2
    one = migrator("history", "--rank", "train-1-0a0b0c0e", "--json").json["moves"]
    assert [(move["move"], move["uid"]) for move in one] == [("m-000000000001", "train-1-0a0b0c0e")]
    assert migrator("history", "--job", "other", "--json").json["moves"] == []


def test_status_and_recover_take_the_id_for_the_move_in_progress(halfway: FakeCluster, migrator: Migrator) -> None:
    later = a_record("source", "m-00000000000f", begun_unix_s=5000.0, ended_unix_s=6000.0, outcome=2)
    other = a_record("source", "m-00000000000e", begun_unix_s=5000.0, rank_uid="train-2-00000001")
    halfway["node-1"].moves = [*halfway["node-1"].moves, later, other]
    assert migrator("status", "train-1-00000001", "--json").json["move"] == MOVE
    (recovered,) = migrator("recover", "train-1-00000001", "--json").json["moves"]
    assert recovered["move"] == MOVE
    assert halfway["node-1"].called("Abort") == ["Abort"]
    for verb in ("status", "recover"):
        assert migrator(verb, "train-1-ffffffff").code == NotFound.exit_code
