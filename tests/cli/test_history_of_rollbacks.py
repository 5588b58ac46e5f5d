"""What `migrator history` says about rollbacks: work was lost, and how much."""

from __future__ import annotations

from migrator.rollbacks import described
from tests.cli.conftest import Migrator, a_record
from tests.cli.fake_daemon import FakeCluster
from tests.cli.fake_jobs import a_rollback

WORDS = "rolled back 143 s, down 11.8 s, node-7 lost (does not answer)"


def test_rollback_is_a_line_of_its_own(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].jobs = [a_rollback()]
    cluster["node-1"].moves = [
        a_record("source", f"m-00000000000{at}", ended_unix_s=ended, outcome=2)
        for at, ended in enumerate((1000.0, 3000.0))
    ]
    _, newest, middle, oldest = migrator("history").out.splitlines()
    assert newest.startswith("m-000000000001")
    assert oldest.startswith("m-000000000000")
    assert middle.startswith("m-0000000000cc")
    assert middle.endswith(WORDS)
    assert "11.8 s" in middle
    answer = migrator("history", "--json").json
    assert [one["move"] for one in answer["moves"]] == ["m-000000000001", "m-000000000000"]
    (one,) = answer["rollbacks"]
    assert (one["lost_s"], one["down_s"], one["text"], one["coordinator"]) == (143.2, 11.8, WORDS, "node-1")
    assert migrator("history", "--limit", "1", "--json").json["rollbacks"] == []


def test_rollback_is_shown_for_its_job_and_its_ranks(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-2"].jobs = [a_rollback()]
    for arguments, count in ((("--job", "train"), 1), (("--job", "x"), 0), (("--rank", "1"), 1), (("--rank", "2"), 0)):
        assert len(migrator("history", *arguments, "--json").json["rollbacks"]) == count, arguments


def test_rollback_is_in_the_history_when_the_job_goes_on_or_is_given_up(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    waits = a_rollback("m-0000000000c1", resumed_unix_s=0.0, down_s=0.0, ended_by="")
    dropped = a_rollback("m-0000000000c2", resumed_unix_s=0.0, down_s=0.0, ended_by="dropped: given up")
    snapshot = a_rollback("m-0000000000c3", kind="snapshot")
    cluster["node-1"].jobs = [waits, dropped, snapshot]
    (one,) = migrator("history", "--json").json["rollbacks"]
    assert one["record"] == "m-0000000000c2"
    assert one["text"] == "rolled back 143 s, given up, node-7 lost (does not answer)"


def test_unknown_loss_is_not_called_no_loss() -> None:
    assert described(None, 3.0, "why") == "rolled back (lost time unknown), down 3.0 s, why"
    assert described(0.0, 3.0, "why") == "rolled back 0.00 s, down 3.0 s, why"
