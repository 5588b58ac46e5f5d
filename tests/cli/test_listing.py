"""Tests what ps and nodes show, and what every listing does if nodes do not answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from migrator import formatting
from migrator.cli import nodes, ps
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, Denied, NotFound, Unreachable
from tests.cli.conftest import MOVE, Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster

LISTING = (("ps",), ("nodes",), ("status",), ("history",), ("recover",))


def test_ps_shows_processes_and_hides_their_home_keepers(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", 0), a_rank("node-1", 1, place=pb.Rank.AWAY, at_node="spare-1")]
    cluster["spare-1"].ranks = [a_rank("spare-1", 1, home_node="node-1", moves=3)]
    ran = migrator("ps")
    assert ran.code == 0
    heads, first, second = ran.out.splitlines()
    assert heads.split() == list(ps.HEADS)
    assert first.split()[:5] == ["train", "0", "node-1", "node-1", "4711"]
    assert second.split()[:5] == ["train", "1", "spare-1", "node-1", "4711"]
    assert "1.5 GB" in first
    assert "away (on spare-1)" in migrator("ps", "--all").out


def test_ps_json_has_every_field(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-2"].ranks = [a_rank("node-2", 7, moving=MOVE, user_id=1000, started_unix_s=5.0)]
    (rank,) = migrator("ps", "--json").json["ranks"]
    assert rank == {
        "uid": "train-7-00000001",
        "job": "train",
        "rank": 7,
        "node": "node-2",
        "at_node": "node-2",
        "home": "node-2",
        "pid": 4711,
        "user_id": 1000,
        "memory_bytes": 1_500_000_000,
        "gpus": [],
        "device_bytes": 0,
        "started_unix_s": 5.0,
        "moves": 0,
        "moving": MOVE,
        "place": "here",
        "command": "python train.py",
    }


def test_ps_shows_one_row_for_a_rank_that_is_being_moved(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["spare-1"].ranks = [a_rank("spare-1", home_node="node-1", moving=MOVE, moves=1)]
    cluster["node-1"].ranks = [a_rank("node-1", moving=MOVE)]
    (rank,) = migrator("ps", "--json").json["ranks"]
    assert (rank["node"], rank["moving"]) == ("node-1", MOVE)
    assert len(migrator("ps", "--json", "--all").json["ranks"]) == 2


def test_ps_shows_the_home_keeper_if_the_node_of_the_rank_does_not_answer(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", 1, place=pb.Rank.AWAY, at_node="spare-1")]
    cluster.stop("spare-1")
    ran = migrator("ps")
    assert ran.code == 0
    assert "away (on spare-1)" in ran.out
    assert "warning: spare-1: " in ran.err


def test_ps_shows_only_ranks_of_the_given_job(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", job="a"), a_rank("node-1", job="b")]
    assert [rank["job"] for rank in migrator("ps", "--job", "b", "--json").json["ranks"]] == ["b"]


def test_control_characters_of_a_command_are_replaced(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", command="evil\x1b[2J\rname\n")]
    assert "evil?[2J?name" in migrator("ps").out


#: C1 (CSI), DEL, bidirectional override and isolate, line separator, a tag character outside the BMP; and harmless text.
CONTROLS = "a\x9b2J\x7f\x85\u202eb\u2066\u2028\U000e0041 été 训练 🚂"


def test_control_characters_that_json_allows_are_escaped(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1", command=CONTROLS)]
    ran = migrator("ps", "--json")
    assert ran.json["ranks"][0]["command"] == CONTROLS
    assert ran.out.rstrip("\n").isprintable(), "a terminal would act on a character of this line"
    assert "été 训练 🚂" in ran.out
    assert migrator("ps").out.replace("\n", "").isprintable()


def test_lone_surrogates_are_escaped_in_json() -> None:
    line = formatting.json_line({"path": "/tmp/\udcff"})
    assert line == '{"path": "/tmp/\\udcff"}'
    assert json.loads(line) == {"path": "/tmp/\udcff"}


def test_job_of_another_user_with_the_same_name_is_told_apart(cluster: FakeCluster, migrator: Migrator) -> None:
    """Otherwise any user could make any job immovable."""
    cluster["node-1"].ranks = [a_rank("node-1", 1, user_id=0)]
    cluster["node-2"].ranks = [a_rank("node-2", 1, user_id=4_000_001, uid="train-1-00000002")]
    ask = ("check", "--rank", "1", "--to", "spare-1", "--job", "train")
    ran = migrator(*ask, "--json")
    assert (ran.code, ran.json["error"]) == (Ambiguous.exit_code, "ambiguous")
    assert ran.json["message"] == "several users have a rank 1: train of root (0), train of 4000001"
    assert ran.json["remedy"] == "select its user with --user"
    for user, user_id, node in (("root", 0, "node-1"), ("0", 0, "node-1"), ("4000001", 4_000_001, "node-2")):
        found = migrator(*ask, "--user", user, "--json").json
        assert (found["user_id"], found["source"]) == (user_id, node)
    none = migrator(*ask, "--user", "4000002", "--json")
    assert (none.code, none.json["error"]) == (NotFound.exit_code, "not-found")
    assert migrator(*ask, "--user", "no such user", "--json").json["error"] == "usage"
    assert [rank["uid"] for rank in migrator("ps", "--user", "4000001", "--json").json["ranks"]] == ["train-1-00000002"]


@pytest.mark.parametrize("verb", LISTING, ids=" ".join)
def test_node_that_does_not_answer_is_a_warning(
    cluster: FakeCluster, migrator: Migrator, verb: tuple[str, ...]
) -> None:
    cluster.stop("node-2")
    ran = migrator(*verb)
    assert ran.code == 0
    assert ran.err.startswith("warning: node-2: ")
    result = migrator(*verb, "--json")
    assert result.code == 0
    assert "node-2" in result.out
    assert result.err == ""


@pytest.mark.parametrize("verb", LISTING, ids=" ".join)
def test_exit_code_is_unreachable_if_no_node_answers(
    cluster: FakeCluster, migrator: Migrator, verb: tuple[str, ...]
) -> None:
    cluster.stop(*cluster.daemons)
    ran = migrator(*verb, "--json")
    assert ran.code == Unreachable.exit_code
    assert ran.json["error"] == "unreachable"
    for node in cluster.daemons:
        assert node in ran.json["message"]


def test_exit_code_is_denied_if_every_node_denies_the_call(cluster: FakeCluster, migrator: Migrator) -> None:
    for daemon in cluster.daemons.values():
        daemon.failures["ListRanks"] = Denied("not for you")
    ran = migrator("ps")
    assert ran.code == Denied.exit_code
    assert "not for you" in ran.err
    assert Denied.remedy in ran.err


def test_nodes_shows_nodes_that_answer_and_nodes_that_do_not(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster.stop("spare-1")
    ran = migrator("nodes")
    assert ran.code == 0
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert set(rows) == set(cluster.daemons)
    assert "up" in rows["node-1"]
    assert "8.0 GB" in rows["node-1"]
    assert "4.2.1" in rows["node-1"]
    assert "unreachable" in rows["spare-1"]
    result = {node["name"]: node for node in migrator("nodes", "--json").json["nodes"]}
    assert result["node-1"]["ranks"] == 1
    assert result["node-1"]["state"] == "up"
    assert result["spare-1"]["state"] == "unreachable"
    assert result["spare-1"]["reason"]


def test_ps_shows_the_gpus_of_each_rank(cluster: FakeCluster, migrator: Migrator) -> None:
    uuids = ["GPU-1a2b3c4d-0000-1111-2222-333344445555", "GPU-5e6f7a8b-0000-1111-2222-333344445555"]
    cluster["node-1"].ranks = [
        a_rank("node-1", 0, gpus=uuids[:1], device_bytes=1_300_000_000),
        a_rank("node-1", 1),
        a_rank("node-1", 2, gpus=uuids, device_bytes=50_000_000_000),
    ]
    heads, *rows = migrator("ps").out.splitlines()
    assert heads.split() == [*ps.HEADS[:7], "GPU", *ps.HEADS[7:]]
    at = heads.index("GPU")
    assert [row[at:].split("  ")[0] for row in rows] == [
        "GPU-1a2b3c4d 1.3 GB",
        "-",
        "GPU-1a2b3c4d,GPU-5e6f7a8b 50.0 GB",
    ]
    result = migrator("ps", "--json").json["ranks"]
    assert [(rank["gpus"], rank["device_bytes"]) for rank in result] == [
        (uuids[:1], 1_300_000_000),
        ([], 0),
        (uuids, 50_000_000_000),
    ]


def a_gpu(index: int, name: str = "NVIDIA H200", **fields: Any) -> pb.Gpu:
    given: dict[str, Any] = {
        "uuid": f"GPU-{index}a2b3c4d",
        "index": index,
        "name": name,
        "compute_capability": "9.0",
        "memory_bytes": 150_000_000_000,
        "memory_free_bytes": 140_000_000_000,
    }
    return pb.Gpu(**(given | fields))


def test_nodes_shows_gpu_models_free_memory_and_problems(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].gpus = [
        a_gpu(0, processes=[pb.GpuProcess(pid=7, memory_bytes=5, mps=True)]),
        a_gpu(1, reserved_for=MOVE),
        a_gpu(2, "NVIDIA A100", mig=True),
    ]
    cluster["node-2"].gpu_problem = "NVML: Driver/library version mismatch"
    cluster["spare-1"].gpus, cluster["spare-1"].gpu_problem = [a_gpu(0)], "GPU 1 is lost"
    heads, *rows = migrator("nodes").out.splitlines()
    assert heads.split()[-1] == "GPUS"
    assert [row[heads.index("GPUS") :] for row in rows] == [
        "2 × NVIDIA H200, 1 × NVIDIA A100 (MIG), 420.0 GB free, 1 reserved",
        "unknown: NVML: Driver/library version mismatch",
        "1 × NVIDIA H200, 140.0 GB free, others unknown: GPU 1 is lost",
    ]
    result = {node["name"]: node for node in migrator("nodes", "--json").json["nodes"]}
    assert result["node-1"]["driver_version"] == "580.159.04"
    assert [(gpu["index"], gpu["mig"], gpu["reserved_for"]) for gpu in result["node-1"]["gpus"]] == [
        (0, False, ""),
        (1, False, MOVE),
        (2, True, ""),
    ]
    assert result["node-1"]["gpus"][0] == {
        "uuid": "GPU-0a2b3c4d",
        "index": 0,
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "memory_bytes": 150_000_000_000,
        "memory_free_bytes": 140_000_000_000,
        "mig": False,
        "reserved_for": "",
        "processes": [{"pid": 7, "memory_bytes": 5, "mps": True}],
    }
    assert result["node-2"]["gpu_problem"] == "NVML: Driver/library version mismatch"
    assert result["node-2"]["gpus"] == []
    cluster["node-2"].gpu_problem = ""
    assert migrator("nodes").out.splitlines()[2].split()[-1] == "-"


def test_nodes_omits_the_gpu_column_if_no_node_has_gpus(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster.stop("node-2")
    ran = migrator("nodes").out.splitlines()
    assert " ".join(ran[0].split()) == " ".join(nodes.HEADS)
    assert ran[2].split()[-2:] == ["-", "-"]
