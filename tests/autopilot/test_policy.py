"""The policy file: what it accepts, what its rules match, and when they may act."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.autopilot import policy
from migrator.autopilot.model import Action, Severity
from snapshotd.api.errors import BadConfig, NotFound
from tests.autopilot.worlds import alarm, rank


def test_default_is_to_observe_only() -> None:
    rule = policy.from_values({"rules": [{"name": "x"}]}, "test").rules[0]
    assert rule.action is Action.OBSERVE
    assert policy.Policy().rules == ()
    assert not policy.Policy().spares.floating


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        'timezone = "Mars/Base"\nbraker = 1\n'
        '[[rules]]\nname = "a"\naction = "destroy"\n'
        '[[rules]]\nname = "b"\nseverity = "bad"\nhours = ["25:00-26:00"]\n'
        "[breaker]\nmoves = -1\n"
        "[[jobs]]\nmove = 3\n"
        '[[rules]]\nname = "c"\n[[rules]]\nname = "c"\n'
    )
    with pytest.raises(BadConfig) as caught:
        policy.read(file)
    text = caught.value.message
    for part in (
        "timezone: must be the name",
        "braker: unknown key",
        "rules[1].action: must be observe, taint, move or drain",
        "rules[2].severity: must be notice, warning or critical",
        "rules[2].hours",
        "breaker.moves: must be a number of moves",
        "jobs[1].job: is missing",
        "jobs[1].move: must be true or false",
        "two have the name 'c'",
    ):
        assert part in text, text


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no policy file"):
        policy.read(tmp_path / "none")


def test_the_first_rule_that_matches_decides() -> None:
    made = policy.from_values(
        {
            "rules": [
                {"name": "quiet", "checks": ["gpu-thermal"], "severity": "notice"},
                {"name": "gpus", "subjects": ["gpu:*"], "severity": "warning", "action": "move"},
                {"name": "rest", "action": "taint"},
            ]
        },
        "test",
    )

    def name(found: policy.Rule | None) -> str | None:
        return found.name if found else None

    assert name(made.rule_for(alarm("n", "gpu-thermal", "gpu:1"))) == "quiet"
    assert name(made.rule_for(alarm("n", "gpu-ecc", "gpu:1", severity=Severity.WARNING))) == "gpus"
    assert name(made.rule_for(alarm("n", "mce", "host"))) == "rest"
    assert name(made.rule_for(alarm("n", "mce", "host", severity=Severity.WARNING))) is None


def test_a_user_does_not_get_the_treatment_of_another_users_job() -> None:
    """A job is named by its user and its name."""
    for named in ("1500", "root"):
        made = policy.from_values({"jobs": [{"job": "night-*", "user": named, "move": False, "priority": 7}]}, "test")
        owner = 0 if named == "root" else 1500
        mine, other = (rank(0, "node-1", job="night-1") for _ in range(2))
        assert made.job_for(replace(mine, user_id=owner)).priority == 7
        assert made.job_for(replace(other, user_id=1501)) == policy.Job("*")
    with pytest.raises(BadConfig, match=r"jobs\[1\].user"):
        policy.from_values({"jobs": [{"job": "night-*", "user": "nobody-has-this-name"}]}, "test")


def test_jobs_are_found_by_pattern() -> None:
    made = policy.from_values({"jobs": [{"job": "night-*", "move": False, "priority": 7}]}, "test")
    assert not made.job_for(rank(0, "n", "night-1")).move
    assert made.job_for(rank(0, "n", "day")).move


@pytest.mark.parametrize(
    ("hours", "moment", "covered"),
    [
        ("22:00-06:00", "2026-11-17T23:00", True),
        ("22:00-06:00", "2026-11-17T05:59", True),
        ("22:00-06:00", "2026-11-17T06:00", False),
        ("Fri 22:00-06:00", "2026-11-21T05:00", True),  # Saturday morning belongs to Friday's hours
        ("Fri 22:00-06:00", "2026-11-20T05:00", False),
        ("Sat,Sun 00:00-24:00", "2026-11-22T23:59", True),
        ("Sat,Sun 00:00-24:00", "2026-11-23T00:00", False),
        ("Fri-Mon 08:00-09:00", "2026-11-22T08:30", True),
        ("Fri-Mon 08:00-09:00", "2026-11-24T08:30", False),
    ],
)
def test_hours(hours: str, moment: str, covered: bool) -> None:
    made = policy.from_values({"rules": [{"name": "x", "hours": [hours]}]}, "test")
    assert made.in_hours(made.rules[0], datetime.fromisoformat(f"{moment}+00:00").timestamp()) is covered


def test_hours_are_those_of_the_time_zone() -> None:
    made = policy.from_values({"timezone": "Europe/Berlin", "rules": [{"name": "x", "hours": ["08:00-09:00"]}]}, "test")
    assert made.in_hours(made.rules[0], datetime(2026, 7, 1, 6, 30, tzinfo=UTC).timestamp())
    assert not made.in_hours(made.rules[0], datetime(2026, 7, 1, 8, 30, tzinfo=UTC).timestamp())


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 7 * 1440 - 1))
def test_hours_and_their_complement_cover_every_minute_once(first: int, last: int, minute: int) -> None:
    if first == last:
        return
    begin, end = (f"{at // 60:02}:{at % 60:02}" for at in (first, last))
    made = policy.from_values(
        {"rules": [{"name": "in", "hours": [f"{begin}-{end}"]}, {"name": "out", "hours": [f"{end}-{begin}"]}]}, "test"
    )
    now = (datetime(2026, 11, 16, tzinfo=UTC) + timedelta(minutes=minute)).timestamp()
    assert made.in_hours(made.rules[0], now) is not made.in_hours(made.rules[1], now)


@pytest.mark.parametrize("hours", ["", "8:00-9:00", "08:00-08:00", "Foo 08:00-09:00", "08:61-09:00", "24:01-03:00"])
def test_wrong_hours_are_refused(hours: str) -> None:
    with pytest.raises(BadConfig, match="hours"):
        policy.from_values({"rules": [{"name": "x", "hours": [hours]}]}, "test")
