"""What a node says in the hands of an attacker: it changes nothing about other nodes, and makes no verb fail for them."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, WrongState
from tests.cli.conftest import MOVE, Migrator, a_rank, a_record
from tests.cli.fake_daemon import FakeCluster

HOSTILE = "node-2"


@pytest.fixture
def halfway(cluster: FakeCluster) -> FakeCluster:
    """A committed move from node-1 to spare-1, which runs the rank."""
    cluster["node-1"].moves.append(a_record("source", outcome=pb.COMMIT))
    cluster["spare-1"].moves.append(a_record("target"))
    cluster["spare-1"].copy = pb.Copy(state=pb.Copy.RUNNING)
    return cluster


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_node_cannot_answer_for_the_source_or_the_target_of_a_move(
    cluster: FakeCluster, migrator: Migrator, role: str
) -> None:
    cluster["node-1"].moves.append(a_record("source", outcome=pb.COMMIT, target_node="node-2"))
    cluster["node-2"].moves.append(a_record("target", target_node="node-2"))
    cluster["node-2"].copy = pb.Copy(state=pb.Copy.RUNNING)
    cluster["spare-1"].moves.append(a_record(role, target_node="node-2", begun_unix_s=1e9))  # not asked for
    cluster["spare-1"].copy = pb.Copy(state=pb.Copy.NO_SUCH_MOVE)
    ran = migrator("recover", MOVE, "--target-is-dead", "--yes")
    assert ran.code == WrongState.exit_code
    assert "node-2 answers that it runs the rank" in ran.err
    assert [one.called("DeclareTargetDead") for one in (cluster["node-1"], cluster["spare-1"])] == [[], []]


@pytest.mark.parametrize("role", ["source", "target"])
def test_nodes_that_contradict_each_other_about_a_move_are_named(
    halfway: FakeCluster, migrator: Migrator, role: str
) -> None:
    halfway[HOSTILE].moves.append(a_record(role, begun_unix_s=1e9, **{f"{role}_node": HOSTILE}))
    ran = migrator("recover", MOVE, "--target-is-dead", "--yes")
    assert ran.code == Ambiguous.exit_code
    assert HOSTILE in ran.err
    assert halfway["node-1"].called("DeclareTargetDead") == []
    assert migrator("recover", MOVE).code == Ambiguous.exit_code
    assert migrator("status").code == 0


def test_a_node_that_claims_a_rank_cannot_keep_it_from_being_moved(cluster: FakeCluster, migrator: Migrator) -> None:
    rank = a_rank("node-1", 1)
    cluster["node-1"].ranks.append(rank)
    cluster[HOSTILE].ranks.append(rank)
    cluster[HOSTILE].ranks.append(a_rank(HOSTILE, 1, job="other", uid=rank.uid, moving="m-000000000000"))
    asked = ("move", "--rank", rank.uid, "--to", "spare-1")
    assert migrator(*asked).code != 0
    ran = migrator(*asked, "--from", "node-1")
    assert ran.code == 0, ran.err
    assert cluster[HOSTILE].called("Begin") == []
    assert len(cluster["node-1"].called("Begin")) == 1


def test_the_remedy_for_two_claims_of_a_rank_works(cluster: FakeCluster, migrator: Migrator) -> None:
    for node in ("node-1", HOSTILE):
        cluster[node].ranks.append(a_rank("node-1", 1))
    ran = migrator("check", "--rank", "1", "--to", "spare-1")
    assert ran.code == Ambiguous.exit_code
    assert "--from node-1" in ran.err


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize("moment", [1e300, -1e300, 1e18])
def test_times_and_values_that_nothing_can_show_make_no_verb_fail(
    halfway: FakeCluster, migrator: Migrator, json: bool, moment: float
) -> None:
    more = ["--json"] if json else []
    strange = 99
    halfway[HOSTILE].health = pb.Health(
        alarms=[pb.Alarm(check="c", subject="host", severity=strange, since_unix_s=moment)],  # type: ignore[arg-type]
        checks=[pb.HealthCheck(name="c", state=strange)],  # type: ignore[arg-type]
    )
    named = {"begun_unix_s": moment, "ended_unix_s": 0.0, "source_node": HOSTILE, "outcome": strange}
    halfway[HOSTILE].moves.append(a_record("source", "m-00000000beef", **named))
    halfway[HOSTILE].ranks.append(a_rank(HOSTILE, started_unix_s=moment))
    for verb in (["health", "--all"], ["status"], ["status", "m-00000000beef"], ["history"], ["ps"]):
        ran = migrator(*verb, *more)
        assert ran.code in (0, 10), (verb, ran.err)
        assert "Traceback" not in ran.err
        if json:
            assert ran.json
