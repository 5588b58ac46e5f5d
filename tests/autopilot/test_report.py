"""The numbers of the report, from records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from migrator.autopilot import chain, report
from migrator.autopilot.model import MoveState
from tests.autopilot.worlds import move, rank

DAY = 86400.0


class Log:
    def __init__(self) -> None:
        self.records: list[chain.Record] = []

    def add(self, unix_s: float, kind: str, node: str = "", **data: Any) -> None:
        previous = self.records[-1].digest if self.records else chain.START
        text = str(data.pop("text", ""))
        self.records.append(chain.record(len(self.records) + 1, unix_s, kind, node, text, data, previous))

    def moved(self, unix_s: float, number: int, cause_class: str, state: str = "moved", **fields: Any) -> None:
        one = move(
            rank(number, "node-1", job=f"j{number}"),
            "spare-1",
            MoveState.INTENDED,
            id=f"m-{len(self.records)}",
            cause_class=cause_class,
            detected_unix_s=unix_s - 5,
            job_gpus=8,
            **fields,
        )
        self.add(unix_s, "intent", "node-1", **asdict(one))
        self.add(unix_s + 2, "result", "node-1", id=one.id, state=state, result="", pause_s=1.5)

    def build(self, **fields: Any) -> report.Report:
        return report.build(self.records, **{"since_unix_s": 0.0, "until_unix_s": 10 * DAY, **fields})


def test_share_is_by_class_and_with_and_without_software() -> None:
    log = Log()
    log.moved(DAY, 0, "hardware")
    log.moved(DAY, 1, "network", "undone")
    log.moved(DAY, 2, "software", "lost")
    log.moved(DAY, 3, "planned")
    made = log.build()
    assert (made.total.resolved, made.total.all, made.total.percent) == (2, 4, 50.0)
    assert (made.without_software.resolved, made.without_software.all) == (2, 3)
    assert {name: share.all for name, share in made.by_class.items()} == {
        "hardware": 1,
        "network": 1,
        "planned": 1,
        "software": 1,
        "unknown": 0,
    }
    assert [one.outcome for one in made.interruptions] == ["moved", "not moved", "lost", "moved"]


def test_attempts_for_one_cause_are_one_interruption() -> None:
    log = Log()
    log.moved(DAY, 0, "hardware", "undone")
    log.moved(DAY + 60, 0, "hardware")
    (one,) = log.build().interruptions
    assert (one.outcome, one.attempts, one.pause_s, one.decided_unix_s) == ("moved", 2, 3.0, DAY)


def test_saved_time_counts_half_an_interval_and_the_restart_less_the_pause() -> None:
    log = Log()
    log.moved(DAY, 0, "hardware")
    log.moved(DAY, 1, "planned")  # without a move it would have waited for a checkpoint: nothing is claimed for it
    made = log.build(checkpoint_minutes=60, restart_minutes=10)
    assert made.saved_gpu_hours == 8 * (40 * 60 - 1.5) / 3600
    assert made.gpu_seconds == 2 * 8 * 1.5


def test_rank_that_could_not_be_moved_is_in_the_denominator() -> None:
    log = Log()
    facts: dict[str, Any] = {
        "rank_uid": "a",
        "job_key": "0/train",
        "rank": 0,
        "source": "node-1",
        "cause": "rule x",
        "cause_class": "hardware",
        "detected_unix_s": DAY,
        "job_gpus": 8,
    }
    log.add(DAY, "alert", about="rank 0", text="rank 0: no spare", **facts)
    assert [(one.outcome, one.text) for one in log.build().interruptions] == [("waiting", "no spare")]
    log.add(2 * DAY, "alert-over", about="rank 0")
    assert [one.outcome for one in log.build().interruptions] == ["not moved"]


def test_only_the_asked_time_and_job_are_shown() -> None:
    log = Log()
    log.moved(DAY, 0, "hardware")
    log.moved(5 * DAY, 1, "hardware")
    assert [one.rank for one in log.build(since_unix_s=3 * DAY).interruptions] == [1]
    assert [one.rank for one in log.build(job="j0").interruptions] == [0]


def test_worst_node_is_first_and_planned_drains_are_no_failures() -> None:
    log = Log()

    def change(day: float, node: str, to: str, by: str = "autopilot") -> None:
        log.add(day * DAY, "state", node, **{"from": "x", "to": to, "by": by})

    log.add(0, "start")
    for day in (1, 3):
        change(day, "lemon", "tainted")
        change(day + 0.25, "lemon", "draining")
        change(day + 0.5, "lemon", "returned")
    change(2, "node-2", "draining")
    change(2, "node-3", "draining", "alice")
    first, second = log.build().nodes
    assert (first.node, first.failures, first.mtbf_s, first.mttr_s) == ("lemon", 2, 5 * DAY, DAY / 2)
    assert (second.node, second.failures, second.mttr_s) == ("node-2", 1, None)
