"""The verbs without a running autopilot: orders are carried out by the verb itself, and everything is in the record."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from migrator.autopilot import actor
from migrator.autopilot.engine import Engine
from migrator.autopilot.world import World
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import BadConfig, Busy, Damaged, NotFound, Refused, Usage, WrongState
from tests.autopilot.conftest import PilotCluster, until
from tests.autopilot.test_store import tampered
from tests.cli.conftest import Migrator, a_rank


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text(
        '[[rules]]\nname = "gpus"\nchecks = ["gpu-*"]\naction = "move"\n'
        '[[jobs]]\njob = "fixed"\nmove = false\n[breaker]\nnodes_percent = 80\n'
    )
    return file


def test_drain_moves_every_rank_and_leaves_a_summary(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", 0), a_rank("node-1", 1), a_rank("node-1", job="other")]
    ran = migrator("drain", "node-1", "--reason", "a fan", "--json")
    assert (ran.code, ran.json["complete"], ran.json["state"], ran.json["before"]) == (0, True, "drained", "healthy")
    assert ran.json["summary"] == "3 ranks moved"
    assert {move["state"] for move in ran.json["moves"]} == {"moved"}
    assert set(pilots.places().values()) == {"spare-1"}
    assert migrator("report", "verify", "--json").json["valid"]


def test_drain_as_text(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    ran = migrator("drain", "node-1")
    assert ran.out.splitlines()[-1] == "node-1 is drained: 1 rank moved"
    assert ran.out.splitlines()[1].split()[:5] == ["train", "0", "node-1", "spare-1", "moved"]


def test_dry_run_of_a_drain_changes_nothing(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", 0), a_rank("node-1", 1)]
    ran = migrator("drain", "node-1", "--to", "node-3", "--dry-run", "--json")
    assert [(rank["rank"], rank["target"], rank["decision"]) for rank in ran.json["ranks"]] == [
        (0, "node-3", "move"),
        (1, "node-3", "move"),
    ]
    assert pilots.begun() == 0
    assert "node-3" in migrator("drain", "node-1", "--to", "node-3", "--dry-run").out
    assert migrator("drain", "node-2", "--dry-run").out == "no rank would be moved\n"
    assert migrator("undrain", "node-1", "--json").json["before"] == "healthy"


def test_drain_leaves_excluded_jobs_and_evacuate_takes_them(
    pilots: PilotCluster, migrator: Migrator, policy: Path
) -> None:
    pilots["node-1"].ranks += [a_rank("node-1"), a_rank("node-1", job="fixed")]
    ran = migrator("drain", "node-1", "--policy", str(policy), "--json")
    assert (ran.code, ran.json["complete"], ran.json["state"]) == (Refused.exit_code, False, "draining")
    assert "rank 0 of fixed stays" in ran.json["summary"]
    assert pilots.places()["fixed-0-00000001"] == "node-1"
    assert migrator("evacuate", "node-1", "--policy", str(policy), "--json").json["complete"]
    assert set(pilots.places().values()) == {"spare-1"}


def test_drain_without_a_usable_spare_says_why(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    for spare in ("spare-1", "spare-2"):
        assert migrator("taint", spare, "--reason", "noise", "--json").json["state"] == "tainted"
    ran = migrator("drain", "node-1")
    assert ran.code == Refused.exit_code
    assert "no node can take it (node-2, node-3: is no spare; spare-1, spare-2: is tainted)" in ran.out
    assert pilots.places() == {"train-0-00000001": "node-1"}
    migrator("untaint", "spare-2")
    assert migrator("drain", "node-1").code == 0
    assert pilots.places() == {"train-0-00000001": "spare-2"}


def test_drain_is_complete_if_the_last_rank_is_seen_to_be_gone_within_a_round(
    pilots: PilotCluster, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes answer at any moment: also after a round has decided about nodes, and before it decides about orders."""
    pilots["node-1"].ranks.append(a_rank("node-1"))
    decide = Engine._about_nodes
    late: list[bool] = []

    async def too_early(self: Engine, world: World) -> tuple[World, dict[str, str]]:
        if not late and not any(rank.node == "node-1" for rank in world.ranks):
            late.append(True)
            return world, {}
        return await decide(self, world)

    monkeypatch.setattr(Engine, "_about_nodes", too_early)
    ran = migrator("drain", "node-1", "--json")
    assert late
    assert (ran.code, ran.json["complete"], ran.json["state"]) == (0, True, "drained")


def test_drain_of_a_silent_node_ends_and_says_so(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots.stop("node-1")
    ran = migrator("drain", "node-1", "--json")
    assert (ran.code, "does not answer" in ran.json["summary"]) == (Refused.exit_code, True)


def test_return_validates_the_node_and_moves_its_ranks_back(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].raise_alarm()
    assert migrator("drain", "node-1").code == 0
    assert pilots.places() == {"train-0-00000001": "spare-1"}
    pilots["node-1"].diagnosis = pb.DiagnoseReply(
        findings=[pb.Diagnosis(check="criu", state="failed", text="it is gone")]
    )
    failed = migrator("return", "node-1", "--json")
    assert (failed.code, failed.json["state"]) == (Refused.exit_code, "repairing")
    assert "criu: it is gone" in failed.json["summary"]
    assert pilots.places() == {"train-0-00000001": "spare-1"}
    pilots["node-1"].diagnosis = pb.DiagnoseReply()
    ran = migrator("return", "node-1", "--json")
    assert (ran.code, ran.json["state"], ran.json["summary"]) == (0, "returned", "1 rank moved")
    assert pilots.places() == {"train-0-00000001": "node-1"}
    assert not pilots["node-1"].health.alarms


def test_validation_program_of_the_policy_decides(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[validation]\ncommand = ["/bin/sh", "-c", "echo burnt $0; exit 3"]\n')
    ran = migrator("return", "node-2", "--policy", str(file), "--json")
    assert (ran.code, "ended with 3: burnt node-2" in ran.json["summary"]) == (Refused.exit_code, True)


def test_order_is_left_to_a_running_autopilot_and_taken_over_when_it_ends(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path
) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    state = tmp_path / "state"
    ran: list[Any] = []
    with actor.only_one(state):  # as an autopilot that does nothing
        thread = threading.Thread(target=lambda: ran.append(migrator("drain", "node-1", "--json")))
        thread.start()
        until("the order", lambda: (state / "autopilot.sqlite").exists())
        thread.join(2)
        assert thread.is_alive()
        assert pilots.begun() == 0
    thread.join(60)
    assert ran[0].json["complete"]


def test_second_autopilot_is_refused(pilots: PilotCluster, migrator: Migrator, policy: Path, tmp_path: Path) -> None:
    with actor.only_one(tmp_path / "state"):
        assert migrator("autopilot", "--policy", str(policy)).code == Busy.exit_code


def test_taint_of_a_drained_node_is_refused_and_undrain_ends_it(pilots: PilotCluster, migrator: Migrator) -> None:
    assert migrator("drain", "node-2").code == 0
    assert migrator("taint", "node-2").code == WrongState.exit_code
    assert "it was drained" in migrator("undrain", "node-2", "--dry-run").out
    assert migrator("undrain", "node-2", "--json").json["before"] == "drained"
    assert migrator("taint", "node-2").code == 0


def test_unknown_nodes_are_refused(pilots: PilotCluster, migrator: Migrator, policy: Path) -> None:
    for argv in (
        ("drain", "nod-1"),
        ("drain", "node-1", "--to", "nowhere"),
        ("taint", "x"),
        ("undrain", "x"),
        ("policy", "explain", "x", "--policy", str(policy)),
    ):
        assert migrator(*argv).code == NotFound.exit_code
    assert migrator("drain", "node-1", "--to", "a/b").code == Usage.exit_code


# ---------------------------------------------------------------------- what is shown


def test_spares(pilots: PilotCluster, migrator: Migrator) -> None:
    migrator("taint", "spare-2")
    pilots["spare-1"].ranks.append(a_rank("spare-1"))
    found = {spare["node"]: spare for spare in migrator("spares", "--json").json["spares"]}
    assert (found["spare-1"]["usable"], found["spare-1"]["ranks"]) == (True, 1)
    assert (found["spare-2"]["usable"], found["spare-2"]["reason"]) == (False, "is tainted")
    assert set(found) == {"spare-1", "spare-2"}
    assert "no: is tainted" in migrator("spares").out


def test_policy_check(migrator: Migrator, policy: Path, tmp_path: Path) -> None:
    assert "1 rules, 1 of them act" in migrator("policy", "check", str(policy)).out
    assert migrator("policy", "check", str(policy), "--json").json["acts"]
    (tmp_path / "bad.toml").write_text("x = 1")
    assert migrator("policy", "check", str(tmp_path / "bad.toml")).code == BadConfig.exit_code
    assert migrator("policy", "check", str(tmp_path / "none.toml")).code == NotFound.exit_code
    (tmp_path / "empty.toml").write_text("")
    assert "would only observe" in migrator("policy", "check", str(tmp_path / "empty.toml")).out


def test_policy_explain_says_what_would_be_done_and_does_nothing(
    pilots: PilotCluster, migrator: Migrator, policy: Path
) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].raise_alarm()
    pilots["node-1"].raise_alarm("mce")
    argv = ("policy", "explain", "node-1", "--policy", str(policy))
    found = migrator(*argv, "--json").json
    assert (found["decision"], found["ranks"][0]["decision"], found["ranks"][0]["target"]) == (
        "taint",
        "move",
        "spare-1",
    )
    assert {alarm["check"]: alarm["rule"] for alarm in found["alarms"]} == {"gpu-ecc": "gpus", "mce": None}
    text = migrator(*argv).out
    assert "rule gpus: move" in text
    assert "no rule matches: observe" in text
    assert "rank 0 of train: move to spare-1" in text
    assert pilots.begun() == 0
    assert "has no alarm" in migrator("policy", "explain", "node-2", "--policy", str(policy)).out


def test_report_in_every_format(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    migrator("drain", "node-1", "--reason", "=1+1 <b>")
    found = migrator("report", "--json").json
    assert found["resolved_without_lost_progress"] == {"all": 1, "resolved": 1, "percent": 100.0}
    assert found["by_class"]["planned"]["all"] == 1
    assert json.loads(migrator("report", "--format", "json").out)["interruptions"][0]["outcome"] == "moved"
    assert "100.0 % (1 of 1)" in migrator("report").out
    (line,) = csv.DictReader(io.StringIO(migrator("report", "--format", "csv").out))
    assert (line["node"], line["target"], line["outcome"]) == ("node-1", "spare-1", "moved")
    page = migrator("report", "--format", "html").out
    assert "<td>planned</td>" in page
    assert "http" not in page
    assert migrator("report", "--json", "--job", "other").json["interruptions"] == []
    assert migrator("report", "--since", "soon").code == Usage.exit_code
    assert migrator("report", "--head", "x").code == Usage.exit_code


def test_report_verify_notices_tampering(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    migrator("taint", "node-1")
    head = migrator("report", "verify", "--json").json["head"]
    migrator("untaint", "node-1")
    assert migrator("report", "verify", "--head", head).code == 0
    tampered(tmp_path / "state", "UPDATE events SET text = 'nothing happened' WHERE id = 1")
    ran = migrator("report", "verify")
    assert (ran.code, "record 1 was changed" in ran.err) == (Damaged.exit_code, True)
    assert migrator("report", "verify", "--json").json["problems"]


def test_report_without_a_log(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    assert migrator("report", "--state", str(tmp_path / "none")).code == NotFound.exit_code
