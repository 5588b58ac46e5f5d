"""How long something must persist before it is an alarm."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from snapshotd.health import counters_file
from snapshotd.health.windows import HOUR_S, Counters, Rate, Recent


def test_the_errors_of_a_machines_life_are_no_increase_unless_asked_for() -> None:
    counters = Counters()
    assert counters.increase("a", 1000) == 0
    assert counters.increase("a", 1003) == 3
    assert counters.increase("b", 2, first=0) == 2
    assert counters.increase("b", 2, first=0) == 0


def test_a_counter_that_began_again_counts_from_zero() -> None:
    counters = Counters({"a": 1000})
    assert counters.increase("a", 4) == 4
    assert counters.increase("a", 4) == 0


@given(st.lists(st.integers(0, 50), max_size=30))
def test_every_error_counts_once(increases: list[int]) -> None:
    counters, value, seen = Counters({"a": 0}), 0, 0
    for increase in increases:
        value += increase
        seen += counters.increase("a", value)
    assert seen == sum(increases)


def test_a_rate_counts_the_last_hour_only() -> None:
    rate = Rate(10)
    assert rate.add(0.0, 6) == 0
    assert rate.add(HOUR_S - 1, 5) == 11
    assert rate.add(HOUR_S, 0) == 0, "the cause is not seen again"
    assert rate.add(HOUR_S + 1, 4) == 0, "the first six are too old"
    assert rate.add(HOUR_S + 2, 1) == 10


def test_so_many_of_the_last_readings() -> None:
    recent = Recent(3, 5)
    assert [recent.add(bad) for bad in (True, False, True, True, False, False, False, True)] == [
        *(False, False, False, True),
        *(False, False, False, False),
    ]
    always = Recent(100, 2)
    assert [always.add(True), always.add(True)] == [False, True], "more than all is all"


def test_counters_survive_a_restart_and_the_position_in_the_log_a_boot_does_not(tmp_path: Path) -> None:
    counters_file.save(tmp_path, "boot-1", {"kernel-log": 7, "gpu": 3})
    assert counters_file.load(tmp_path, "boot-1").values == {"kernel-log": 7, "gpu": 3}
    assert counters_file.load(tmp_path, "boot-2").values == {"gpu": 3}
    (tmp_path / counters_file.FILE).write_text("?")
    assert counters_file.load(tmp_path, "boot-1").values == {}
    counters_file.save(tmp_path / "nowhere", "boot-1", {})
