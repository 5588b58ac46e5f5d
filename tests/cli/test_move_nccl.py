"""Tests `migrator move` of an NCCL rank: the job waits at one cut and continues, whether or not the move succeeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from migrator.quiesce import view
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NcclFailed, Timeout, Undone, Unreachable
from tests.cli.conftest import Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster
from tests.cli.gated_job import Gated, Group, collective, receive, send

NCCL = ("PrepareDevice", "Report", "Close", "SetTargets", "Detach", "Freeze", "Attach", "Commit", "Open")
PLACES = ("node-1", "node-2")


def deal(cluster: FakeCluster, *processes: Gated) -> None:
    """Places rank 0 on node-1, rank 1 on node-2, rank 2 on node-1, and so on."""
    for process in processes:
        node = PLACES[process.rank % 2]
        cluster[node].gated.append(process)
        if all(rank.rank != process.rank for rank in cluster[node].ranks):
            cluster[node].ranks.append(a_rank(node, process.rank))


def world(size: int) -> list[dict[str, tuple[int, int]]]:
    return [{"aa": (size, comm_rank)} for comm_rank in range(size)]


def moved(migrator: Migrator, *more: str) -> dict[str, Any]:
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json", *more)
    assert ran.code == 0, ran.out + ran.err
    return ran.json


def test_rank_that_is_behind_runs_to_the_cut(cluster: FakeCluster, migrator: Migrator) -> None:
    program = [collective("aa")] * 50
    ahead, behind = Gated(0, world(2)[0], program, at=20), Gated(1, world(2)[1], program, at=17)
    deal(cluster, ahead, behind)
    result = moved(migrator)
    assert (ahead.at, behind.at) == (20, 20)
    assert (ahead.gate, behind.gate) == ("open", "open")
    assert cluster["node-1"].called("PrepareDevice", "Close")[:2] == ["PrepareDevice", "Close"], (
        "made ready while the job runs"
    )
    assert cluster["node-1"].called(*NCCL)[-6:] == ["Close", "Detach", "Freeze", "Attach", "Commit", "Open"]
    assert cluster["node-2"].called("SetTargets"), "only a gate that has something to reach is told"
    assert not cluster["node-1"].called("SetTargets")
    assert cluster["node-2"].called(*NCCL)[-1] == "Open"
    phases = [phase["name"] for phase in result["phases"]]
    assert phases == [
        *("preflight", "prepare", "quiesce", "detach", "freeze", "stream", "restore", "reattach", "re-point"),
        *("commit", "activate", "open", "settle", "clean"),
    ]


def test_nccl_phases_are_printed(cluster: FakeCluster, migrator: Migrator) -> None:
    deal(cluster, *(Gated(rank, world(2)[rank], [collective("aa")] * 3, at=2) for rank in range(2)))
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == 0
    assert "quiesce 0." in ran.out
    assert "reattach 0." in ran.out


def test_nccl_steps_are_skipped_for_a_rank_without_communicators(cluster: FakeCluster, migrator: Migrator) -> None:
    """For a rank that only loaded NCCL, no gate is closed and no other node is asked."""
    deal(cluster, Gated(0, {}, []), Gated(1, {"bb": (1, 0)}, [collective("bb")] * 9, at=3))
    result = moved(migrator)
    assert not {"quiesce", "detach", "reattach", "open"} & {phase["name"] for phase in result["phases"]}
    assert set(cluster["node-1"].called(*NCCL)) == {"PrepareDevice", "Report", "Freeze", "Commit"}
    assert cluster["node-2"].called(*NCCL) == []


def test_nccl_steps_are_made_for_a_rank_whose_nccl_keeps_rdma_devices(cluster: FakeCluster, migrator: Migrator) -> None:
    """It has destroyed its last communicator. Its devices are closed as those of a rank that has some."""
    deal(cluster, Gated(0, {}, [], rdma=("mlx5_0",)))
    result = moved(migrator)
    assert {"quiesce", "detach", "reattach", "open"} <= {phase["name"] for phase in result["phases"]}


def test_sends_and_receives_use_ranks_of_the_communicator(cluster: FakeCluster, migrator: Migrator) -> None:
    """One communicator has ranks 2 and 0, in that order; rank 1 is only in the world communicator. Rank 2 has sent. Rank 0
    has not received yet, because a collective comes first that rank 1 has not reached."""
    memberships = [{"aa": (3, 0), "cc": (2, 1)}, {"aa": (3, 1)}, {"aa": (3, 2), "cc": (2, 0)}]
    deal(
        cluster,
        Gated(0, memberships[0], [collective("aa"), receive("cc", 0), collective("aa")]),
        Gated(1, memberships[1], [collective("aa"), collective("aa")]),
        Gated(2, memberships[2], [collective("aa"), send("cc", 1), collective("aa")], at=2),
    )
    moved(migrator)
    assert [process.at for node in PLACES for process in cluster[node].gated] == [2, 2, 1]  # ranks 0, 2, 1


def test_two_processes_of_one_rank_are_distinguished(cluster: FakeCluster, migrator: Migrator) -> None:
    """mp.spawn under one keeper: each process is a member of the communicator, and the error names the process."""
    program: list[Group | None] = [collective("aa")] * 5
    first, second = Gated(0, world(3)[0], program, at=4, pid=50), Gated(0, world(3)[1], program, at=2, pid=60)
    deal(cluster, first, second, Gated(1, world(3)[2], program, at=3))
    moved(migrator)
    assert (first.at, second.at) == (4, 4)
    second.program = [*program[:4], None]
    first.program = [*program, collective("aa")]
    first._count(collective("aa"))
    first.at = 5
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--quiesce-timeout", "0.1")
    assert "process 60 of rank 0 has not reached operation 5 of communicator aa" in ran.err


def test_rank_stuck_in_user_code_makes_quiesce_time_out_and_gates_open(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    lost = Gated(1, world(2)[1], [collective("aa"), None], at=1)
    deal(cluster, Gated(0, world(2)[0], [collective("aa")] * 3, at=2), lost)
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--quiesce-timeout", "0.2")
    assert ran.code == Undone.exit_code
    assert "rank 1 has not reached operation 2 of communicator aa: it is in user code" in ran.err
    assert "--quiesce-timeout" in ran.err
    assert "running on source" in ran.err
    assert [cluster[node].called("Open") for node in PLACES] == [["Open"], ["Open"]]
    assert not cluster["node-1"].called("Detach", "Freeze")
    assert lost.gate == "open"


def test_waiting_thread_passes_by_a_guess_if_there_is_no_progress(
    cluster: FakeCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits with an operation of another communicator. Two threads use it, so it is not certain to come first."""
    monkeypatch.setattr(view, "PATIENCE_S", 0.01)
    memberships = [{"aa": (2, 0), "bb": (2, 0)}, {"aa": (2, 1), "bb": (2, 1)}]
    behind = Gated(1, memberships[1], [collective("bb"), collective("aa")], users=(7, 8))
    deal(cluster, Gated(0, memberships[0], [collective("bb"), collective("aa")], at=0), behind)
    cluster["node-1"].gated[0].counts["aa", "c", -1] = 1  # launched by another thread
    moved(migrator)
    assert behind.counts == {("aa", "c", -1): 1, ("bb", "c", -1): 1}


@pytest.mark.parametrize("step", ["Detach", "Attach"])
def test_failure_between_cut_and_commit_is_undone_and_gates_open(
    cluster: FakeCluster, migrator: Migrator, step: str
) -> None:
    deal(cluster, *(Gated(rank, world(2)[rank], [collective("aa")] * 3, at=2) for rank in range(2)))
    cluster["node-1"].failures[step] = NcclFailed("process 100: ncclCommInitRankConfig answers 6")
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Undone.exit_code
    assert "answers 6" in ran.err
    assert cluster["node-1"].called("Abort", "Open") == ["Abort", "Open"]
    assert cluster["node-2"].called("Open")
    assert not cluster["node-1"].called("Commit")


def test_outcome_is_queried_if_abort_times_out(cluster: FakeCluster, migrator: Migrator) -> None:
    """The source recreates communicators for longer than Abort's time-out, so its record has to be queried."""
    deal(cluster, *(Gated(rank, world(2)[rank], [collective("aa")] * 3, at=2) for rank in range(2)))
    cluster["node-1"].failures |= {"Attach": NcclFailed("answers 6"), "Abort": Timeout("it took too long")}
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Undone.exit_code
    assert cluster["node-1"].called("Abort", "GetOutcome", "Open") == ["Abort", "GetOutcome", "Open"]
    assert cluster["spare-1"].called("Discard")


def test_gate_that_opens_later_is_reported_and_does_not_fail_the_move(cluster: FakeCluster, migrator: Migrator) -> None:
    deal(cluster, *(Gated(rank, world(2)[rank], [collective("aa")] * 3, at=2) for rank in range(2)))
    cluster["node-2"].gate_waits_for = "the source"
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == 0
    assert "gates open later on node-2: the source" in ran.err


# ---------------------------------------------------------------- preflight


def test_communicator_members_unknown_to_all_daemons_are_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    deal(cluster, Gated(0, world(3)[0], [collective("aa")]), Gated(1, world(3)[1], [collective("aa")]))
    ran = migrator("check", "--rank", "0", "--to", "spare-1", "--json")
    refused = {check["name"]: check["reason"] for check in ran.json["checks"] if check["verdict"] == "refuse"}
    assert refused == {
        "nccl-members": "1 members of 1 of its NCCL communicators are not ranks that a daemon knows",
    }
    assert not cluster["node-1"].called("Close")


class Brief(Gated):
    """A process that has made and destroyed another communicator whenever it is asked."""

    def shown(self) -> pb.ProcessGate:
        self.memberships = {"aa": self.memberships["aa"], f"{0xB0 + next(self.numbers):x}": (2, 0)}
        return super().shown()

    numbers: ClassVar[Iterator[int]] = itertools.count()


def test_communicators_that_exist_for_a_moment_do_not_refuse_a_move(cluster: FakeCluster, migrator: Migrator) -> None:
    """Nodes do not report at the same moment: the other member has such a communicator no more, or not yet."""
    deal(cluster, Brief(0, world(2)[0], [collective("aa")]), Gated(1, world(2)[1], [collective("aa")]))
    ran = migrator("check", "--rank", "0", "--to", "spare-1", "--json")
    assert [check for check in ran.json["checks"] if check["verdict"] == "refuse"] == []
    assert ran.code == 0


def test_refusal_names_a_node_of_the_job_that_does_not_answer(cluster: FakeCluster, migrator: Migrator) -> None:
    deal(cluster, *(Gated(rank, world(2)[rank], [collective("aa")]) for rank in range(2)))
    cluster["node-2"].failures["Report"] = Unreachable("node node-2 could not be reached")
    ran = migrator("check", "--rank", "0", "--to", "spare-1", "--json")
    reasons = [check["reason"] for check in ran.json["checks"] if check["name"] == "nccl-members"]
    assert "node-2 could not be reached" in reasons[0]


def test_refusals_of_a_peer_count_only_for_shared_communicators(cluster: FakeCluster, migrator: Migrator) -> None:
    deal(cluster, Gated(0, world(2)[0], []), Gated(1, {"aa": (2, 1), "bb": (1, 0)}, []))
    cluster["node-2"].gated[0].refusals = {"aa": ["it has a symmetric-memory window"], "bb": ["it has been revoked"]}
    ran = migrator("check", "--rank", "0", "--to", "spare-1", "--json")
    assert [check["reason"] for check in ran.json["checks"] if check["name"] == "nccl"] == [
        "rank 1, process 100: communicator aa: it has a symmetric-memory window"
    ]
