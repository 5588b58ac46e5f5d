"""Tests `migrator recover`: which daemons it calls, and what it refuses to do."""

from __future__ import annotations

import pytest

from migrator import recover
from migrator.cluster import Cluster
from migrator.journals import Move, all_moves
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, OutcomeUnknown, SnapshotError, Timeout, Unreachable, Usage, WrongState
from tests.cli.conftest import CHANGING, MOVE, Migrator, a_record, changes
from tests.cli.fake_daemon import FakeCluster


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables waiting, because the fakes settle at once or never."""
    monkeypatch.setattr(recover, "LEASE_WAIT_S", 0.0)
    monkeypatch.setattr(recover, "SETTLE_WAIT_S", 0.0)


def test_nothing_is_done_if_all_moves_have_ended(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [a_record("source", ended_unix_s=5.0, outcome=pb.ABORT)]
    ran = migrator("recover")
    assert (ran.code, ran.out) == (0, "nothing to recover: all moves have ended\n")
    assert changes(cluster) == {}


def test_named_undecided_move_is_undone_at_once(halfway: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("recover", MOVE, "--json")
    assert ran.code == 0
    (move,) = ran.json["moves"]
    assert (move["outcome"], move["where"]) == ("undone", "running on source")
    assert changes(halfway) == {"node-1": ["Abort"], "spare-1": ["Discard"]}
    (token,) = [request.token for method, request in halfway["spare-1"].asked if method == "Discard"]
    assert token == b"token"


def test_undecided_move_is_left_to_its_driver_unless_named(halfway: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("recover", "--json")
    assert ran.code == OutcomeUnknown.exit_code
    (move,) = ran.json["moves"]
    assert move["outcome"] == "unknown"
    assert f"migrator recover {MOVE}" in move["remedy"]
    assert changes(halfway) == {}


def test_undecided_move_is_awaited_until_it_ends(
    halfway: FakeCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "LEASE_WAIT_S", 60.0)
    monkeypatch.setattr(recover, "POLL_S", 0.01)
    asked = []

    async def expiring(cluster: Cluster, move: str = "") -> tuple[list[Move], dict[str, SnapshotError]]:
        """The lease expires before the fourth question."""
        asked.append(move)
        if len(asked) == 4:
            for daemon in (halfway["node-1"], halfway["spare-1"]):
                daemon.moves[0].outcome, daemon.moves[0].ended_unix_s = pb.ABORT, 1999.0
        return await all_moves(cluster, move)

    monkeypatch.setattr(recover, "all_moves", expiring)
    ran = migrator("recover", "--json")
    assert (ran.code, len(asked)) == (0, 4)
    assert ran.json["moves"][0]["outcome"] == "undone"
    assert changes(halfway) == {}


def test_abort_undoes_all_undecided_moves(halfway: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("recover", "--abort")
    assert ran.code == 0
    assert f"{MOVE}  rank 1 of job train: undone; the rank is running on source (node-1)" in ran.out
    assert changes(halfway) == {"node-1": ["Abort"], "spare-1": ["Discard"]}


def test_committed_move_is_finished_by_passing_on_the_token(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    ran = migrator("recover", "--json")
    assert ran.code == 0
    (move,) = ran.json["moves"]
    assert (move["outcome"], move["where"], move["ended"]) == ("moved", "running on target", True)
    assert move["did"] == ["spare-1 runs the rank", "node-1 released its copy"]
    assert changes(halfway) == {"node-1": ["Release"], "spare-1": ["Activate"]}


def test_abort_never_undoes_a_committed_move(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    assert migrator("recover", MOVE, "--abort").code == 0
    assert "Abort" not in halfway["node-1"].called(*CHANGING)


def test_unreachable_target_of_a_committed_move_needs_the_operator(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    halfway["node-1"].failures["Release"] = Unreachable("the target does not answer")
    halfway.stop("spare-1")
    ran = migrator("recover", "--json")
    assert ran.code == OutcomeUnknown.exit_code
    assert "--target-is-dead" in ran.json["moves"][0]["remedy"]


def test_unreachable_source_needs_the_operator(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway.stop("node-1")
    ran = migrator("recover", "--abort", "--json")
    assert ran.code == OutcomeUnknown.exit_code
    assert "--source-is-dead" in ran.json["moves"][0]["remedy"]
    assert changes(halfway) == {}


@pytest.mark.parametrize("dead", ["node-2", ""])
def test_undo_that_waits_for_a_node_is_not_said_to_end_alone(
    halfway: FakeCluster, migrator: Migrator, dead: str
) -> None:
    """A node with other ranks of the job is dead, so their communicators cannot be rebuilt."""
    record = halfway["node-1"].moves[0]
    record.outcome, record.waiting_for = pb.ABORT, "its communicators are not built again yet: on node-2: no answer"
    halfway["node-1"].failures["Abort"] = WrongState("it is not undone yet")
    if dead:
        halfway.stop(dead)
    (move,) = migrator("recover", "--json").json["moves"]
    assert f"migrator recover {MOVE} --member-is-dead NODE" in move["remedy"]
    assert "source-is-dead" not in move["remedy"]
    assert dead in move["remedy"]
    assert "on node-2: no answer" in move["waiting_for"]


def test_declaring_a_member_dead_gives_its_communicators_up(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.ABORT
    halfway.stop("node-2")
    ran = migrator("recover", MOVE, "--member-is-dead", "node-2", "--yes", "--json")
    assert ran.code == 0
    assert ran.json["moves"][0]["did"] == ["node-1 opens the gates without communicators"]
    assert changes(halfway) == {"node-1": ["DeclareMemberDead"]}
    ((_, request),) = [call for call in halfway["node-1"].asked if call[0] == "DeclareMemberDead"]
    assert (request.move, request.node) == (MOVE, "node-2")
    assert "@" in request.declared_by


@pytest.mark.parametrize("answer", ["in time", "too late"])
def test_declaration_that_is_not_carried_out_at_once_is_reported_as_such(
    halfway: FakeCluster, migrator: Migrator, answer: str
) -> None:
    """The source may have to wait for an attempt of minutes, or for a decision."""
    record = halfway["node-1"].moves[0]
    record.outcome = pb.ABORT
    halfway.stop("node-2")
    if answer == "too late":
        halfway["node-1"].failures["DeclareMemberDead"] = Timeout("it did not answer in time")
    else:
        halfway["node-1"].abandons = False
    ran = migrator("recover", MOVE, "--member-is-dead", "node-2", "--yes", "--json")
    assert ran.code == OutcomeUnknown.exit_code
    (did,) = ran.json["moves"][0]["did"]
    late = "carries it out when its attempt to build communicators ends"
    assert (late if answer == "too late" else "has not decided yet how the move ends") in did


@pytest.mark.parametrize("how", ["it answers here", "it answers another node", "it is the source"])
def test_member_that_is_not_known_to_be_dead_cannot_be_declared_dead(
    halfway: FakeCluster, migrator: Migrator, how: str
) -> None:
    halfway["node-1"].moves[0].outcome = pb.ABORT
    if how == "it answers another node":
        halfway.stop("node-2")
        halfway["spare-1"].finds = pb.FindNodeReply(daemon_answers=True, found="its daemon answers")
    ran = migrator("recover", MOVE, "--member-is-dead", "node-1" if how == "it is the source" else "node-2", "--yes")
    assert ran.code == (Usage if how == "it is the source" else WrongState).exit_code, ran.err
    assert changes(halfway) == {}


@pytest.mark.parametrize("source", ["node-1", "made-up"])
def test_move_that_its_source_never_began_is_ended(halfway: FakeCluster, migrator: Migrator, source: str) -> None:
    """Its source answers and does not know it, or is no node of the cluster."""
    halfway["node-1"].moves.clear()
    halfway["spare-1"].moves[0].mark = "prepared"
    halfway["spare-1"].moves[0].source_node = source
    ran = migrator("recover", "--json")
    assert ran.code == 0
    (move,) = ran.json["moves"]
    assert (move["outcome"], move["ended"]) == ("undone", True)
    assert move["did"] == ["spare-1 dropped what it had prepared: the move never began"]
    assert changes(halfway) == {"spare-1": ["Discard"]}


@pytest.mark.parametrize("mark", ["restoring", "held"])
def test_copy_that_may_be_whole_is_not_dropped_without_its_source(
    halfway: FakeCluster, migrator: Migrator, mark: str
) -> None:
    halfway["node-1"].moves.clear()
    halfway["spare-1"].moves[0].mark = mark
    ran = migrator("recover", "--json")
    assert ran.code == OutcomeUnknown.exit_code
    assert "--source-is-dead" in ran.json["moves"][0]["remedy"]
    assert changes(halfway) == {}


def test_prepared_move_of_a_silent_source_is_left_to_it(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["spare-1"].moves[0].mark = "prepared"
    halfway.stop("node-1")
    assert migrator("recover", "--json").code == OutcomeUnknown.exit_code
    assert changes(halfway) == {}


def test_declaring_the_source_dead_lets_the_target_run(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway.stop("node-1")
    ran = migrator("recover", MOVE, "--source-is-dead", "--yes", "--json")
    assert ran.code == 0
    (move,) = ran.json["moves"]
    assert (move["outcome"], move["where"], move["did"]) == (
        "moved",
        "running on target",
        ["spare-1 lets the rank run"],
    )
    ((method, request),) = [call for call in halfway["spare-1"].asked if call[0] in CHANGING]
    assert (method, request.move) == ("DeclareSourceDead", MOVE)
    assert "@" in request.declared_by


def test_source_that_answers_cannot_be_declared_dead(halfway: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("recover", MOVE, "--source-is-dead", "--yes")
    assert ran.code == WrongState.exit_code
    assert "node-1 answers" in ran.err
    assert changes(halfway) == {}


def test_declaring_the_target_dead_lets_the_source_run(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    halfway.stop("spare-1")
    ran = migrator("recover", MOVE, "--target-is-dead", "--yes", "--json")
    assert ran.code == 0
    (move,) = ran.json["moves"]
    assert (move["outcome"], move["where"]) == ("undone", "running on source")
    assert changes(halfway) == {"node-1": ["DeclareTargetDead"]}


@pytest.mark.parametrize(
    ("state", "accepted"),
    [
        (pb.Copy.HELD, False),
        (pb.Copy.RECEIVING, False),
        (pb.Copy.RUNNING, False),
        (pb.Copy.ENDED, False),
        (pb.Copy.GONE, True),
        (pb.Copy.NO_SUCH_MOVE, True),
        (pb.Copy.DISCARDED, True),
    ],
)
def test_target_that_answers_can_be_declared_dead_only_without_a_copy(
    halfway: FakeCluster, migrator: Migrator, state: pb.Copy.State.ValueType, accepted: bool
) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    halfway["spare-1"].copy = pb.Copy(state=state)
    ran = migrator("recover", MOVE, "--target-is-dead", "--yes")
    assert bool(halfway["node-1"].called("DeclareTargetDead")) is accepted
    assert (ran.code == WrongState.exit_code) is not accepted


def test_declaring_the_target_dead_needs_a_source_that_answers(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway.stop("node-1")
    assert migrator("recover", MOVE, "--target-is-dead", "--yes").code == Unreachable.exit_code


def test_declaration_needs_confirmation(
    halfway: FakeCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway.stop("node-1")

    class Person:
        def __init__(self, answer: str, *, present: bool = True) -> None:
            self.answer, self.present = answer, present

        def isatty(self) -> bool:
            return self.present

        def readline(self) -> str:
            return self.answer

    for stdin in (Person("", present=False), Person("no\n"), Person("\n"), Person("")):
        monkeypatch.setattr("sys.stdin", stdin)
        assert migrator("recover", MOVE, "--source-is-dead").code == Usage.exit_code
        assert changes(halfway) == {}
    monkeypatch.setattr("sys.stdin", Person("yes\n"))
    assert migrator("recover", MOVE, "--source-is-dead").code == 0
    assert changes(halfway) == {"spare-1": ["DeclareSourceDead"]}


def test_target_without_a_record_does_not_fail_recovery(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway["node-1"].moves[0].outcome = pb.COMMIT
    halfway["spare-1"].moves[0].outcome, halfway["spare-1"].moves[0].ended_unix_s = pb.COMMIT, 1999.0
    halfway["spare-1"].failures["Activate"] = NotFound("no such move")
    ran = migrator("recover", "--json")
    assert ran.code == 0
    assert changes(halfway) == {"node-1": ["Release"]}
