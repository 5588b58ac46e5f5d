"""Tests what `migrator move` reports for each outcome, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from migrator.protocol import Verdict
from migrator.results import Event, MoveOptions, MoveResult, PhaseTime
from snapshotd import __version__
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import CriuFailed, OutcomeUnknown, Refused, Undone, Where
from tests.cli.conftest import MOVE, Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster

ROOT = Path(__file__).parents[2]


def moved(**fields: Any) -> MoveResult:
    given: dict[str, Any] = {
        "move": MOVE,
        "job": "train",
        "rank": 1,
        "source": "node-2",
        "target": "spare-1",
        "outcome": Verdict.MOVED,
        "pause_s": 0.93,
        "bytes": 2_000_000_000,
        "phases": [
            PhaseTime("preflight", 0.1, 0),
            PhaseTime("stream", 1.0, 2_000_000_000),
            PhaseTime("clean", 0.05, 0),
        ],
        "where": Where.TARGET_RUNNING,
    }
    return MoveResult(**(given | fields))


def failed(error: Undone | Refused | OutcomeUnknown, outcome: Verdict, where: Where) -> MoveResult:
    return moved(
        outcome=outcome,
        where=where,
        reason=error.message,
        remedy=error.advice,
        error_code=error.code,
        exit_code=error.exit_code,
    )


@pytest.fixture
def drive(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[MoveResult], list[MoveOptions]]:
    """Replaces the driver by one whose move ends with the given result, after some events."""

    def ends_with(result: MoveResult) -> list[MoveOptions]:
        asked: list[MoveOptions] = []

        class Driver:
            def __init__(self, _: object, on_event: Callable[[Event], None], trace: object) -> None:
                self.on_event = on_event

            async def move(self, ask: MoveOptions) -> MoveResult:
                asked.append(ask)
                for phase in result.phases:
                    self.on_event(Event("phase-start", phase.name, 0, 0, 0, ""))
                    self.on_event(Event("phase-end", phase.name, phase.seconds, phase.bytes, 0, ""))
                return result

        monkeypatch.setattr("migrator.driver.Driver", Driver)
        return asked

    return ends_with


def test_successful_move_prints_pause_and_phases(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    asked = drive(moved())
    ran = migrator("move", "--rank", "1", "--to", "spare-1", "--job", "train", "--timeout", "60")
    assert ran.code == 0
    assert asked == [MoveOptions(1, "spare-1", "train", 60.0)]
    assert ran.out.splitlines() == [
        "moved rank 1  node-2 → spare-1  pause 0.9 s",
        "  preflight 0.10  stream 1.00  clean 0.05  (seconds)",
        "  longest: stream 1.0 s at 2.00 GB/s; 2.0 GB sent",
    ]
    assert ran.err.splitlines() == [
        "  preflight  0.1 s",
        "  stream     1.0 s  2.0 GB  2.00 GB/s",
        "  clean      0.05 s",
    ]


def test_json_output_is_exactly_one_object(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    drive(moved())
    ran = migrator("move", "--rank", "1", "--to", "spare-1", "--json")
    assert (ran.code, ran.err) == (0, "")
    wanted = {"move", "job", "rank", "source", "target", "outcome", "pause_s", "bytes", "phases", "reason"}
    assert wanted <= set(ran.json)
    assert ran.json["outcome"] == "moved"
    assert ran.json["phases"][1] == {"name": "stream", "seconds": 1.0, "bytes": 2_000_000_000}


WHOLE = ["Prepare", "Begin", "PrepareDevice", "Freeze", "Stream", "Restore", "Commit", "Activate", "Release"]


def test_move_of_a_gpu_rank_prints_the_parts_of_the_pause(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    parts = [PhaseTime("prepare", 9.0, 0), PhaseTime("offload", 0.5, 25_000_000_000), PhaseTime("refill", 0.8, 25)]
    result = moved(device_bytes=25_000_000_000, parts=parts, longest_part=parts[2])
    drive(result)
    lines = migrator("move", "--rank", "1", "--to", "spare-1").out.splitlines()
    assert [line for line in lines if line.startswith("    ")] == [
        "    PART       TIME     SIZE        RATE",
        "    prepare  9.00 s",
        "    offload  0.50 s  25.0 GB  50.00 GB/s",
        "    refill   0.80 s     25 B   0.00 GB/s",
    ]
    assert any(line.strip().startswith("longest: refill") for line in lines), lines
    drive(result)
    answer = json.loads(migrator("move", "--rank", "1", "--to", "spare-1", "--json").out)
    assert answer["longest_part"] == {"name": "refill", "seconds": 0.8, "bytes": 25}


def test_driver_completes_a_move(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert ran.code == 0
    assert (ran.json["outcome"], ran.json["source"], ran.json["bytes"]) == ("moved", "node-1", 2_500_000)
    assert cluster["node-1"].called(*WHOLE) == ["Begin", "PrepareDevice", "Freeze", "Stream", "Commit", "Release"]
    assert cluster["spare-1"].called(*WHOLE) == ["Prepare", "Restore", "Activate"]
    assert ran.json["parts"][0] == {"name": "prepare", "seconds": 9.0, "bytes": 0}
    assert ran.json["longest_part"]["name"] != "prepare", "the job ran meanwhile"


def test_source_without_prepare_device_can_still_move_a_rank(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].unknown.add("PrepareDevice")
    cluster["node-1"].ranks = [a_rank("node-1")]
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "moved")
    assert "prepare" not in {part["name"] for part in ran.json["parts"]}


@pytest.mark.parametrize("verb", ["move", "check"])
@pytest.mark.parametrize("node", ["node-1", "spare-1"])
@pytest.mark.parametrize(
    ("spoken", "text"),
    [
        (pb.Protocol(), "a protocol without a number"),
        (pb.Protocol(newest=protocol.OLDEST - 1, oldest=1), "protocol"),
        (pb.Protocol(newest=protocol.NEWEST + 2, oldest=protocol.NEWEST + 1), "protocols"),
    ],
    ids=["none", "older", "newer"],
)
def test_daemon_without_a_common_protocol_is_refused_before_any_other_call(
    cluster: FakeCluster, migrator: Migrator, verb: str, node: str, spoken: pb.Protocol, text: str
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster[node].version, cluster[node].protocol = "0.1.0", spoken
    ran = migrator(verb, "--rank", "0", "--to", "spare-1")
    assert ran.code == Refused.exit_code
    assert f"daemon-version: snapshotd 0.1.0 on {node} speaks {text}" in ran.err
    assert f"migrator {__version__} speaks {protocol.described(protocol.own())}" in ran.err
    assert "install the same version" in ran.err
    assert {method for method, _ in cluster[node].asked} == {"GetNode", "ListRanks"}


def test_peer_without_a_common_protocol_is_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].rewires = [pb.Rewire(kind=pb.Rewire.PEER, peer_node="node-2")]
    cluster["node-2"].protocol = pb.Protocol()
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Refused.exit_code
    assert f"daemon-version: snapshotd {__version__} on node-2 speaks a protocol without a number" in ran.err
    assert cluster["node-1"].called("Begin") == []


def test_releases_with_a_common_protocol_may_differ(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].version = "99.0.0"
    cluster["node-1"].protocol = pb.Protocol(newest=protocol.NEWEST + 1, oldest=protocol.NEWEST)
    assert migrator("move", "--rank", "0", "--to", "spare-1").code == 0


def test_driver_undoes_a_move_that_fails(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].failures["Restore"] = CriuFailed(
        "Error (criu/x.c:1): no\nsecond line", where=Where.SOURCE_FROZEN
    )
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Undone.exit_code
    assert "migrator: rank 0 was not moved: undone: Error (criu/x.c:1): no\nsecond line\n" in ran.err
    assert "\n  the rank is: running on source (node-1)\n  remedy: " in ran.err
    assert cluster["node-1"].called("Abort")
    assert cluster["spare-1"].called("Discard")
    assert not cluster["spare-1"].called("Activate")


LATE = Refused("nccl: communicator 01 has a symmetric-memory window", remedy="destroy the window")


@pytest.mark.parametrize("step", ["Begin", "Freeze"])
def test_refusal_after_the_first_preparing_step_is_undone(cluster: FakeCluster, migrator: Migrator, step: str) -> None:
    """Exit code 10 promises that nothing was paused. A late refusal names its check and reports the pause of the job."""
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].failures[step] = LATE
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["error"]) == (Undone.exit_code, "undone", "refused")
    assert ran.json["reason"].startswith(LATE.message)
    assert (ran.json["remedy"], ran.json["where"]) == (LATE.advice, Where.SOURCE_RUNNING)
    assert ("; the job was paused for 0." in ran.json["reason"]) == (step == "Freeze") == (ran.json["pause_s"] > 0)
    assert cluster["node-1"].called("Abort")
    assert cluster["spare-1"].called("Discard")


def test_refusal_by_the_first_preparing_step_is_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].failures["Prepare"] = Refused("gpu: no free GPU of this kind")
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["pause_s"]) == (Refused.exit_code, "refused", 0)
    assert not cluster["node-1"].called("Begin")


ENDS = [
    (Refused("2 checks refuse"), Verdict.REFUSED, Where.SOURCE_RUNNING, "running on source (node-2)"),
    (Undone("the target is full"), Verdict.UNDONE, Where.SOURCE_RUNNING, "running on source (node-2)"),
    (OutcomeUnknown("no answer"), Verdict.UNKNOWN, Where.TARGET_HELD, "held on target (spare-1)"),
]


@pytest.mark.parametrize(("error", "outcome", "where", "shown"), ENDS, ids=[str(end[1]) for end in ENDS])
def test_failed_move_prints_reason_place_of_the_rank_and_remedy(
    drive: Callable[[MoveResult], list[MoveOptions]],
    migrator: Migrator,
    error: Undone | Refused | OutcomeUnknown,
    outcome: Verdict,
    where: Where,
    shown: str,
) -> None:
    drive(failed(error, outcome, where))
    ran = migrator("move", "--rank", "1", "--to", "spare-1")
    assert ran.code == error.exit_code
    assert ran.out == ""
    reply = ran.err.splitlines()[-3:]
    assert reply[0].startswith("migrator: ")
    assert f"{outcome}: {error.message}" in reply[0]
    assert reply[1:] == [f"  the rank is: {shown}", f"  remedy: {error.advice}"]
    as_json = migrator("move", "--rank", "1", "--to", "spare-1", "--json")
    assert (as_json.code, as_json.json["outcome"], as_json.json["where"]) == (error.exit_code, outcome, where)
