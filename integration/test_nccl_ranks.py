"""Ranks that use NCCL move, and their results are exact. Daemons, CRIU and shim are real; the NCCL library is a fake.

The same with the real library, on a GPU, is in integration/gpu.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from integration.harness import PATIENCE_S, SHORT_LEASE, Cluster, until
from integration.nccl_nodes import NcclJob, unsettled
from snapshotd.runtime.faults import Point

SOURCE, PEER, THIRD, TARGET = ("node-1", "node-2", "node-3", "spare-1")
UNDONE = 11


def names(result: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in result["phases"]]


# ---------------------------------------------------------------- moves


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moved", [0, 1])
def test_either_of_two_ranks_moves_there_and_back(nodes: Cluster, moved: int) -> None:
    """Rank 0, which creates the unique ids, or rank 1. NCCL's RAS is on, and ended for each move."""
    ras = ("FAKE_NCCL_LEAVES=ras", "NCCL_RAS_ENABLE=1")
    job = NcclJob(nodes, [SOURCE, SOURCE] if moved else [SOURCE, PEER], environment=ras)
    job.await_lines(5)
    home = job.places[moved]
    for to in (TARGET, home):
        result = nodes.move(job.ranks[moved], to, rank=moved)
        assert {"quiesce", "detach", "reattach", "open"} <= set(names(result))
        job.await_progress()
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL jobs")
def test_copy_sends_what_others_wait_for_after_it_has_its_own_result(nodes: Cluster) -> None:
    """The shim sees the result of the all-reduce that ends the attachment before the held copy has sent it to rank 1.

    The fake's rank 0 computes the result, because it has one number only.
    """
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    job.fault(0, "allreduce.send:0:*:slow")
    for to in (TARGET, SOURCE):
        nodes.move(job.ranks[0], to)
    job.fault(0, "")
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL jobs")
def test_rank_of_four_with_splits_and_sends_moves(nodes: Cluster) -> None:
    job = NcclJob(nodes, [SOURCE, SOURCE, PEER, PEER], shape="pairs", pace_s=0.01)
    job.await_lines(5)
    for rank, to in ((1, TARGET), (2, SOURCE), (1, PEER)):
        nodes.move(job.ranks[rank], to, rank=rank)
        job.await_progress()
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL jobs")
def test_ranks_of_tensor_pipeline_and_data_parallel_job_move(wide: Cluster) -> None:
    """Eight processes on three nodes. Ranks of both pipeline stages move in the middle of a step."""
    places = [SOURCE, SOURCE, SOURCE, PEER, PEER, PEER, THIRD, THIRD]
    job = NcclJob(wide, places, shape="grid", pace_s=0.01)
    job.await_lines(5)
    for rank, to in ((5, TARGET), (2, TARGET), (5, PEER)):
        wide.move(job.ranks[rank], to, rank=rank)
        job.await_progress()
    job.ends_well()


def test_rank_without_communicators_moves_without_gates(nodes: Cluster) -> None:
    job = nodes.workload(SOURCE, "chain.py")
    job.await_lines(5)
    result = nodes.move(job, TARGET)
    assert not {"quiesce", "detach", "reattach", "open"} & set(names(result))
    journals = [path for node in nodes.lab.nodes for path in (nodes.lab.layout.state / node / "gate").glob("**/*")]
    assert not [path for path in journals if result["move"] in path.name]
    job.await_progress()


# ---------------------------------------------------------------- moves that fail


@pytest.mark.sampled(1, group="NCCL failures")
def test_move_is_undone_if_a_rank_does_not_reach_the_cut(nodes: Cluster) -> None:
    job = NcclJob(nodes, [SOURCE, PEER], stuck=(1, 20))
    until("rank 0 to wait for rank 1", (job.meeting / "launched-0").exists)
    done = nodes.migrator(
        *("move", "--rank", "0", "--job", job.ranks[0].name, "--to", TARGET, "--quiesce-timeout", "1", "--json")
    )
    assert done.returncode == UNDONE, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert "rank 1 has not reached operation" in result["reason"], result
    assert result["where"] == "running on source", result
    assert "detach" not in names(result)
    (job.meeting / "go").touch()
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(nodes))
    nodes.move(job.ranks[0], TARGET)
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL failures")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nccl_error_while_communicators_are_rebuilt_is_undone(nodes: Cluster, rank: int) -> None:
    """On the rank that moves or on the one that stays. New communicators are built, and the job continues."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    job.fault(rank, f"init:{rank}:1:fail-remote")
    result = nodes.move(job.ranks[0], TARGET, expect=UNDONE)
    # The copy on the source has its own fault counter: its first attempt fails as well, and it retries.
    assert result["where"] == "running on source", result
    job.fault(rank, "")
    job.await_progress()
    nodes.move(job.ranks[0], TARGET)
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL failures")
def test_move_is_undone_by_name_if_features_of_nccl_keep_something(nodes: Cluster) -> None:
    """Thread and sockets of an old RAS, which the user has switched on, and memory. The communicators are built again."""
    leaves = ("FAKE_NCCL_LEAVES=old-ras,memory", "NCCL_RAS_ENABLE=1")
    job = NcclJob(nodes, [SOURCE, PEER], environment=leaves)
    job.await_lines(5)
    result = nodes.move(job.ranks[0], TARGET, expect=UNDONE)
    said = json.dumps(result)
    named = (
        "a socket of its RAS",
        "thread of its RAS",
        "memory of its transport",
        "NCCL_RAS_ENABLE=0",
        "NCCL_SHM_DISABLE=1",
        "--nccl-safe",
    )
    assert [part for part in named if part not in said] == [], result
    assert result["where"] == "running on source", result
    assert "freeze" not in names(result)
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL failures")
def test_target_does_not_wait_for_a_peer_that_failed(nodes: Cluster) -> None:
    """The peer fails before it builds anything. The copy on the target is notified, and does not wait for its deadline."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    nodes.fault(PEER, Point.ATTACHING, "fail")
    result = nodes.move(job.ranks[0], TARGET, expect=UNDONE)
    assert "fault injected at attaching" in result["reason"], result
    said = nodes.lab.daemon_log(TARGET).read_text()
    assert f"move {result['move']}: giving up building communicators" in said, nodes.logs()
    job.await_progress()
    nodes.move(job.ranks[0], TARGET)
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL failures")
@pytest.mark.slow
def test_peer_that_hangs_while_communicators_are_rebuilt_is_undone(nodes: Cluster) -> None:
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    job.fault(1, "init:1:1:hang")
    result = nodes.move(job.ranks[0], TARGET, expect=UNDONE, timeout_s=150)
    assert result["where"] == "running on source", result
    job.fault(1, "")
    job.await_progress()
    job.ends_well()


# ---------------------------------------------------------------- killed processes


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point"),
    [(SOURCE, Point.QUIESCED), (SOURCE, Point.DETACH), (SOURCE, Point.ATTACH), (PEER, Point.DETACHED)],
)
def test_driver_killed_is_undone_and_gates_open(nodes: Cluster, node: str, point: Point) -> None:
    """The daemons undo the move when the lease ends: communicators rebuilt, gates open."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    nodes.fault(node, point, "wait")
    with nodes.begin_move(job.ranks[0], TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}\n{nodes.logs()}", lambda: nodes.fired(node) or asked.poll() is not None)
        waiting = json.loads(nodes.migrator("status", "--json").stdout)["gates"]
        assert (node, job.places.index(node)) in {(gate["node"], gate["rank"]) for gate in waiting}, waiting
        asked.kill()
        asked.wait(PATIENCE_S)
    with contextlib.suppress(FileNotFoundError):
        (nodes.run_dir(node) / f"{point}.go").touch()
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(nodes))
    assert json.loads(nodes.migrator("status", "--json").stdout)["gates"] == []
    nodes.move(job.ranks[0], TARGET)
    job.ends_well()


KILLS = [
    *((SOURCE, point) for point in (Point.QUIESCED, Point.DETACHED, Point.DETACH, Point.ATTACH, Point.BEFORE_OPEN)),
    *((PEER, point) for point in (Point.QUIESCED, Point.DETACHED, Point.ATTACHING, Point.ATTACHED, Point.BEFORE_OPEN)),
    *((TARGET, point) for point in (Point.ATTACHING, Point.ATTACHED, Point.BEFORE_ACTIVATE)),
]


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(("node", "point"), KILLS)
def test_daemon_killed_leaves_exact_results_and_open_gates(nodes: Cluster, node: str, point: Point) -> None:
    """Moved or undone, the job continues with exact results, and no gate stays closed."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    nodes.fault(node, point, "kill")
    with nodes.begin_move(job.ranks[0], TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}\n{nodes.logs()}", lambda: nodes.lab.daemon_pid(node) is None or asked.poll() is not None)
        assert nodes.lab.daemon_pid(node) is None, f"{asked.communicate()}\n{nodes.logs()}"
        nodes.lab.start_daemon(node)
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode in {0, UNDONE}, f"{out}{errors}{nodes.logs()}"
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(nodes))
    job.ends_well()


#: Between the taking down of communicators and their building.
DOWN = (Point.DETACH, Point.FREEZE, Point.STREAM)
#: What the job gets from a communicator that can never be complete again.
LOST = "was taken down for a move and could not be attached again"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", DOWN)
@pytest.mark.parametrize("killed", ["keeper", "daemon"])
def test_nothing_hangs_if_a_process_is_killed_while_communicators_are_down(
    nodes: Cluster, killed: str, point: Point
) -> None:
    """The moving rank's keeper: the others get NCCL's error. The source's daemon: it builds the communicators again."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    nodes.fault(SOURCE, point, "wait")
    with nodes.begin_move(job.ranks[0], TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}\n{nodes.logs()}", lambda: nodes.fired(SOURCE) or asked.poll() is not None)
        assert asked.poll() is None, f"{asked.communicate()}\n{nodes.logs()}"
        if killed == "keeper":
            job.ranks[0].process.kill()
            (nodes.run_dir(SOURCE) / f"{point}.go").touch()
        else:
            nodes.lab.kill_daemon(SOURCE)
            nodes.lab.start_daemon(SOURCE)
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode != 0, f"{out}{errors}{nodes.logs()}"
    if killed == "daemon":
        job.await_progress()
        until("all moves to be settled", lambda: not unsettled(nodes))
        job.ends_well()
        return
    assert job.ranks[1].finish() == 1, f"{job.ranks[1].text()[-500:]}\n{nodes.logs()}"
    assert LOST in job.ranks[1].text(), job.ranks[1].text()[-500:]
    until(f"nothing to be left\n{nodes.logs()}", lambda: not [*unsettled(nodes), *nodes.leftovers()])


@pytest.mark.sampled(1, group="NCCL failures")
def test_declaration_ends_the_wait_for_a_dead_member(nodes: Cluster) -> None:
    """The daemon of a node that is neither source nor target dies while communicators are down. Gates stay closed until an
    operator declares it dead; then the job ends with NCCL's error, also on that node once it is back."""
    job = NcclJob(nodes, [SOURCE, PEER])
    job.await_lines(5)
    nodes.fault(SOURCE, Point.DETACH, "wait")
    with nodes.begin_move(job.ranks[0], TARGET) as asked:
        until(f"the communicators to be down\n{nodes.logs()}", lambda: nodes.fired(SOURCE) or asked.poll() is not None)
        assert asked.poll() is None, f"{asked.communicate()}\n{nodes.logs()}"
        asked.kill()
        asked.wait(PATIENCE_S)
    (move,) = [one["move"] for one in json.loads(nodes.migrator("status", "--json").stdout)["moves"]]
    declare = ("recover", move, "--member-is-dead", PEER, "--yes", "--json")
    refused = nodes.migrator(*declare)
    assert f"snapshotd on {PEER} answers" in refused.stdout + refused.stderr, refused
    nodes.lab.kill_daemon(PEER)
    (nodes.run_dir(SOURCE) / f"{Point.DETACH}.go").touch()
    waiting = json.loads(nodes.migrator("recover", move, "--json").stdout)["moves"][0]
    assert not waiting["ended"], waiting
    assert f"migrator recover {move} --member-is-dead" in waiting["remedy"], waiting
    gates = json.loads(nodes.migrator("status", "--json").stdout)["gates"]
    assert [(gate["node"], gate["rank"]) for gate in gates] == [(SOURCE, 0)], gates
    done = nodes.migrator(*declare, timeout_s=2 * PATIENCE_S)
    assert done.returncode == 0, f"{done}\n{nodes.logs()}"
    assert f"declared {PEER} dead" in json.loads(done.stdout)["moves"][0]["reason"], done
    assert (job.ranks[0].finish(), LOST in job.ranks[0].text()) == (1, True), job.ranks[0].text()[-500:]
    nodes.lab.start_daemon(PEER)
    assert (job.ranks[1].finish(), LOST in job.ranks[1].text()) == (1, True), job.ranks[1].text()[-500:]
    until(f"nothing to be left\n{nodes.logs()}", lambda: not [*unsettled(nodes), *nodes.leftovers()])
