"""`migrator move --trace`: the file, whatever becomes of the move, and the placement of spans whose clocks differ."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from migrator.driver import trace_events
from migrator.driver.timing import Call, NodeSpans, Timed, difference
from migrator.driver.trace import Trace
from migrator.driver.trace_events import lanes
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import CriuFailed, NotFound, Refused, Undone, Usage
from tests.cli import chrome_trace
from tests.cli.conftest import Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster

AHEAD_S = 5000.0  # a node that was booted earlier


def move(cluster: FakeCluster, migrator: Migrator, path: Path, expect: int = 0) -> chrome_trace.Chart:
    cluster["node-1"].ranks = [a_rank("node-1")]
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json", "--trace", str(path))
    assert ran.code == expect, ran.out + ran.err
    return chrome_trace.read(path)


# ---------------------------------------------------------------- the file


def test_trace_of_a_move_has_the_drivers_steps_and_the_pause(
    cluster: FakeCluster, migrator: Migrator, tmp_path: Path
) -> None:
    chart = move(cluster, migrator, tmp_path / "trace.json")
    assert chart.about["outcome"] == "moved"
    steps = [span.name for span in sorted(chart.spans, key=lambda one: one.began_us) if span.thread == "steps"]
    wanted = ["Inspect", "Prepare", "Begin", "Freeze", "Stream", "Restore", "Commit", "Activate", "Release"]
    assert [name for name in steps if name in wanted] == wanted
    pause = chart.one("pause")
    assert pause.seconds == pytest.approx(chart.about["pause_s"], abs=0.001)
    assert chart.one("Freeze").began_us <= pause.began_us <= chart.one("Source.Freeze").began_us
    for name in ("Stream", "Restore", "Commit"):
        assert pause.began_us <= chart.one(name).began_us <= chart.one(name).ended_us <= pause.ended_us
    assert chart.one("Target.Activate").ended_us <= pause.ended_us <= chart.one("Activate").ended_us
    (attempt,) = [span for span in chart.spans if span.name.startswith("move m-")]
    assert {"Freeze", "Restore"} <= {span.name for span in attempt.below}
    assert chart.one("Source.Freeze").args == {"node": "node-1"}


def test_older_daemons_leave_the_drivers_spans_only(cluster: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    for daemon in cluster.daemons.values():
        daemon.unknown.add("GetSpans")
    chart = move(cluster, migrator, tmp_path / "trace.json")
    assert chart.rows() == {"driver (migrator move)"}
    assert chart.about["missing"] == dict.fromkeys(("node-1", "spare-1"), "its version of snapshotd records no spans")


def test_spans_of_daemons_have_rows_of_their_own(cluster: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    cluster["node-1"].spans = pb.GetSpansReply(
        now_s=AHEAD_S,
        spans=[
            pb.Span(name="Source.Freeze", call=True, began_s=AHEAD_S - 2, seconds=1.0),
            pb.Span(name="stop", began_s=AHEAD_S - 1.9, seconds=0.5, parent=1),
            pb.Span(name="stream", began_s=AHEAD_S - 1.5, seconds=0.5, parent=1, bytes=2 * 10**9),
        ],
    )
    chart = move(cluster, migrator, tmp_path / "trace.json")
    assert chart.rows() == {"driver (migrator move)", "node-1 (source)"}
    call = chart.one("Source.Freeze", "node-1")
    assert [span.name for span in call.below] == ["stop"]  # the other one overlaps: it is beside it
    assert chart.one("stream").args == {"bytes": 2 * 10**9, "GB/s": 4.0}


def test_undone_move_writes_its_trace(cluster: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    cluster["spare-1"].failures["Restore"] = CriuFailed("criu failed")
    chart = move(cluster, migrator, tmp_path / "trace.json", expect=Undone.exit_code)
    assert chart.about["outcome"] == "undone"
    assert chart.one("Restore").args["failed"] == "criu failed"
    assert {"Abort", "Discard"} <= {span.name for span in chart.spans}
    assert chart.one("pause").seconds > 0


def test_refused_move_writes_its_trace(cluster: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    cluster["node-1"].checks = [pb.Check(name="x", verdict=pb.Check.REFUSE, reason="no")]
    chart = move(cluster, migrator, tmp_path / "trace.json", expect=Refused.exit_code)
    assert chart.about["outcome"] == "refused"
    assert chart.named("Inspect")
    assert not chart.named("Freeze")
    assert not chart.named("pause")


def test_move_of_an_unknown_rank_writes_what_was_asked(
    cluster: FakeCluster, migrator: Migrator, tmp_path: Path
) -> None:
    ran = migrator("move", "--rank", "7", "--to", "spare-1", "--trace", str(tmp_path / "trace.json"))
    chart = chrome_trace.read(tmp_path / "trace.json")
    assert ran.code == NotFound.exit_code
    assert chart.about["error"]
    assert chart.named("Node.ListRanks")


def test_a_file_that_cannot_be_written_stops_the_command_before_the_move(
    cluster: FakeCluster, migrator: Migrator, tmp_path: Path
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    path = str(tmp_path / "missing" / "trace.json")
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--trace", path)
    assert ran.code == Usage.exit_code
    assert "cannot be written" in ran.err
    assert not any(daemon.asked for daemon in cluster.daemons.values())


def test_trace_replaces_a_file_only_when_it_is_complete(
    cluster: FakeCluster, migrator: Migrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier move")
    path.chmod(0o644)
    seen: list[str] = []
    document = trace_events.document

    def looking(trace: Trace) -> dict[str, Any]:
        seen.append(path.read_text())
        return document(trace)

    monkeypatch.setattr(trace_events, "document", looking)
    move(cluster, migrator, path)
    assert seen == ["of an earlier move"]
    assert path.stat().st_mode & 0o777 == 0o600, "it has commands and paths of the job"
    assert [one.name for one in tmp_path.glob("*trace.json*")] == ["trace.json"]


def test_trace_that_cannot_be_written_in_the_end_leaves_the_earlier_one(
    cluster: FakeCluster, migrator: Migrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(trace: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "trace.json"
    path.write_text("of an earlier move")
    cluster["node-1"].ranks = [a_rank("node-1")]
    monkeypatch.setattr(trace_events, "document", full)
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--trace", str(path))
    assert (ran.code, path.read_text()) == (0, "of an earlier move")
    assert "the trace was not written: No space left on device" in ran.err
    assert [one.name for one in tmp_path.glob("*trace.json*")] == ["trace.json"]


def test_trace_is_not_written_through_a_link(cluster: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    elsewhere = tmp_path / "of somebody else"
    elsewhere.write_text("precious")
    (tmp_path / "trace.json").symlink_to(elsewhere)
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--trace", str(tmp_path / "trace.json"))
    assert ran.code == Usage.exit_code
    assert "is not a regular file" in ran.err
    assert elsewhere.read_text() == "precious"
    assert not any(daemon.asked for daemon in cluster.daemons.values())


def test_without_trace_daemons_are_asked_for_no_spans(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    assert migrator("move", "--rank", "0", "--to", "spare-1", "--json").code == 0
    assert not any(daemon.called("GetSpans") for daemon in cluster.daemons.values())
    (asked,) = [request for method, request in cluster["node-1"].asked if method == "Inspect"]
    assert asked.move == ""


# ---------------------------------------------------------------- clocks


def test_difference_of_clocks_satisfies_every_call() -> None:
    middle, uncertain = difference([(-10.0, 10.0), (1.0, 8.0), (-3.0, 4.0)])
    assert (middle, uncertain) == (2.5, 1.5)


def test_the_narrowest_limits_count_if_clocks_have_drifted() -> None:
    assert difference([(0.0, 1.0), (5.0, 5.5)]) == (5.25, 0.25)


def test_spans_are_placed_inside_the_drivers_calls_although_clocks_differ() -> None:
    reply = pb.GetSpansReply(
        now_s=AHEAD_S + 9,
        spans=[
            pb.Span(name="Source.Freeze", call=True, began_s=AHEAD_S + 2.1, seconds=0.8),
            pb.Span(name="stop", began_s=AHEAD_S + 2.2, seconds=0.1, parent=1),
            pb.Span(name="late", began_s=AHEAD_S + 2.8, seconds=3.0, parent=1),
            pb.Span(name="Source.Renew", call=True, began_s=AHEAD_S + 3.5, seconds=0.1),
            pb.Span(name="Source.Renew", call=True, began_s=AHEAD_S + 4.5, seconds=0.1),
        ],
    )
    calls = [
        Call("node-1", "Source.Freeze", 2.0, 3.0),
        Call("node-1", "Source.Renew", 0.0, 0.1),  # served twice: which one it is, is not known
        Call("node-1", "Source.Commit", 7.0, 7.1),
    ]
    found = NodeSpans("node-1", ["source"], 8.0, 10.5, reply, calls)
    add_s, uncertain_s = found.clock()
    assert add_s == pytest.approx(-AHEAD_S, abs=0.11)
    assert uncertain_s == pytest.approx(0.1)
    call, stop, late, *_ = found.placed()
    assert 2.0 <= call.began_s <= call.ended_s <= 3.0
    assert (stop.parent, late.parent) == (call, call)
    assert late.ended_s == call.ended_s  # a part ends with the whole


def test_hostile_numbers_of_a_node_give_a_trace_all_the_same() -> None:
    spans = [pb.Span(name="a", began_s=1e300, seconds=-5, parent=99), pb.Span(name="b", began_s=-1e300, parent=-3)]
    placed = NodeSpans("n", [], 0, 1, pb.GetSpansReply(now_s=-1e308, spans=spans), []).placed()
    assert [one.parent for one in placed] == [None, None]
    assert all(one.began_s <= one.ended_s for one in placed)


# ---------------------------------------------------------------- threads of the chart


def test_spans_at_the_same_time_are_put_beside_each_other() -> None:
    whole = Timed("whole", 0.0, 10.0)
    first, second = Timed("first", 1.0, 5.0, parent=whole), Timed("second", 2.0, 3.0, parent=whole)
    inner = Timed("inner", 2.2, 2.8, parent=second)
    after = Timed("after", 5.0, 6.0, parent=whole)
    unfinished = Timed("unfinished", 5.0)
    found = [[span.name for span in lane] for lane in lanes([after, whole, inner, second, first, unfinished])]
    assert found == [["whole", "first", "after"], ["second", "inner"]]
