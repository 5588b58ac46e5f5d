"""`migrator rebalance` brings ranks home, and `evacuate` empties a node of many jobs at a time."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import about_ranks
from migrator.autopilot.model import NodeState, Order
from migrator.autopilot.policy import Policy
from snapshotd.api.errors import Refused
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.worlds import NOW, gpu, node, rank, world
from tests.cli.conftest import Migrator, a_rank

ORDER = Order(4, "rebalance", "", by="alice", since_unix_s=NOW)


def test_ranks_go_home_where_there_is_room_and_the_others_stay() -> None:
    home = node("node-1", gpus=tuple(gpu("node-1", number) for number in range(8)), driver="580.1")
    full, sick = node("node-2", 8), replace(home, name="node-3", state=NodeState.TAINTED)
    spare = node("spare-1", 8)
    homes = ("node-1", "node-1", "node-2", "node-3", "spare-1")
    away = [
        replace(rank(number, "spare-1", f"j{number}", gpus=(number,)), home=name) for number, name in enumerate(homes)
    ]
    found = {one.rank.job: one for one in about_ranks(world(home, full, sick, spare, *away, ORDER), Policy(), NOW)}
    assert {job: (one.decision, one.target) for job, one in found.items()} == {
        "j0": (RankDecision.MOVE, "node-1"),
        "j1": (RankDecision.MOVE, "node-1"),
        "j2": (RankDecision.ALERT, ""),
    }
    assert "node-2: has no room" in found["j2"].reason


def test_rank_that_must_leave_its_home_is_not_brought_back_there() -> None:
    home = node("node-1", state=NodeState.DRAINING)
    away = replace(rank(0, "spare-1"), home="node-1")
    assert about_ranks(world(home, node("spare-1"), away, ORDER), Policy(), NOW) == []


def test_rebalance_moves_ranks_back_and_frees_the_spares(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["spare-1"].ranks += [a_rank("spare-1", number, home_node="node-1") for number in range(2)]
    pilots["spare-2"].ranks.append(a_rank("spare-2", job="other", home_node="node-2"))
    pilots["node-3"].ranks.append(a_rank("node-3", job="calm"))
    plan = migrator("rebalance", "--dry-run", "--json").json["ranks"]
    assert {(one["job"], one["rank"], one["target"]) for one in plan} == {
        ("train", 0, "node-1"),
        ("train", 1, "node-1"),
        ("other", 0, "node-2"),
    }
    assert pilots.begun() == 0
    ran = migrator("rebalance", "--json")
    assert (ran.code, ran.json["complete"], ran.json["summary"]) == (0, True, "3 ranks moved")
    assert set(pilots.places().values()) == {"node-1", "node-2", "node-3"}
    assert migrator("rebalance").out == "0 ranks moved\n"


def test_rebalance_says_which_rank_cannot_go_home(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["spare-1"].ranks.append(a_rank("spare-1", home_node="node-1"))
    pilots["node-1"].room_bytes = 1
    ran = migrator("rebalance")
    assert (ran.code, "rank 0 of train stays: " in ran.out, "node-1: has no room" in ran.out) == (
        Refused.exit_code,
        True,
        True,
    )


def test_evacuated_node_is_left_by_all_jobs_at_the_same_time(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path
) -> None:
    """Four jobs with two ranks each: moves begin only when those of four jobs have begun."""
    jobs = [f"job-{number}" for number in range(4)]
    for daemon in pilots.daemons.values():
        daemon.room_bytes = 1 << 40
    pilots["node-1"].ranks += [a_rank("node-1", number, job) for job in jobs for number in range(2)]
    together = threading.Barrier(4, timeout=60)
    begun: list[str] = []

    def waits(rank_uid: str) -> None:
        begun.append(rank_uid)
        together.wait()

    pilots["node-1"].on_begin = waits
    file = tmp_path / "policy.toml"
    file.write_text('[[jobs]]\njob = "job-3"\nmove = false\n')
    ran = migrator("evacuate", "node-1", "--policy", str(file), "--json")
    assert (ran.code, ran.json["state"], ran.json["summary"]) == (0, "drained", "8 ranks moved")
    assert len({move["id"] for move in ran.json["moves"]}) == len(set(begun)) == 8
    assert {uid.rsplit("-", 2)[0] for uid in begun[:4]} == set(jobs)
    assert set(pilots.places().values()) == {"spare-1"}
