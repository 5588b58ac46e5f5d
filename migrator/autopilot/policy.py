"""The policy file: which alarms lead to which action, when, and within which limits. docs/autopilot.md explains every key.

Invariant: what is not written does not act. A rule without `action` observes, and without any rule nothing is done at all.
All problems of a file are reported together.

    [[rules]]
    name = "gpu-failing"
    checks = ["gpu-*"]           # patterns; the first rule that matches an alarm decides
    severity = "critical"        # and above
    action = "move"              # observe (default), taint, move, drain
    wait_s = 60                  # the alarm must be that old
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from migrator import users
from migrator.autopilot.model import Action, Alarm, Rank, Severity
from snapshotd.api import toml_file
from snapshotd.api.errors import NotFound

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(
    r"(?:(?P<days>[A-Za-z]{3}(?:-[A-Za-z]{3})?(?:,[A-Za-z]{3}(?:-[A-Za-z]{3})?)*) )?"
    r"(?P<from>\d\d:\d\d)-(?P<to>\d\d:\d\d)"
)
_SECONDS = Meta(ge=0, description="a number of seconds")
_SHARE = Meta(ge=0, le=100, description="a number from 0 to 100")


def _severity(text: str) -> str:
    if text.upper() not in Severity.__members__:
        raise ValueError(f"must be notice, warning or critical, not {text!r}")
    return text.upper()


def _hours(text: str) -> str:
    """ "22:00-06:00" or "Sat,Sun 00:00-24:00". Raises ValueError."""
    found = _HOURS.fullmatch(text)
    if found is None or any(day not in _DAYS for day in re.findall("[a-z]+", (found["days"] or "").lower())):
        raise ValueError(text)
    for clock in (found["from"], found["to"]):
        if not (clock <= "24:00" and clock[3:] <= "59"):
            raise ValueError(text)
    if found["from"] == found["to"]:
        raise ValueError(text)
    return text


def _moment(text: str) -> str:
    """ "2026-12-01T22:00", in the policy's time zone. Raises ValueError."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d", text):
        raise ValueError(f'must be a day and a time, as "2026-12-01T22:00", not {text!r}')
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"must be a day and a time that exist, not {text!r}") from error
    if not 2000 <= moment.year < 3000:  # windows reach into the days before and after, which must exist too
        raise ValueError(f"must be in a year from 2000 to 2999, not {text!r}")
    return text


def _user(text: str) -> str:
    """The number, as a text. A job is named by its user and its name. Raises ValueError."""
    return str(users.id_of(text))


def _zone(text: str) -> str:
    try:
        zoneinfo.ZoneInfo(text)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"must be the name of a time zone, as Europe/Berlin, not {text!r}") from error
    return text


class Rule(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=60, description="a short text")]
    checks: Annotated[tuple[str, ...], Meta(min_length=1, description='a list of patterns, as ["gpu-*"]')] = ("*",)
    subjects: Annotated[tuple[str, ...], Meta(min_length=1, description='a list of patterns, as ["gpu:*"]')] = ("*",)
    severity: Annotated[str, toml_file.text("notice, warning or critical", _severity)] = "CRITICAL"
    action: Annotated[Action, Meta(description="observe, taint, move or drain")] = Action.OBSERVE
    wait_s: Annotated[float, _SECONDS] = 0.0
    count: Annotated[int, Meta(ge=1, description="a number from 1 on")] = 1
    hours: Annotated[
        tuple[str, ...],
        toml_file.text('a list of times, as ["22:00-06:00", "Sat,Sun 00:00-24:00"]', _hours),
    ] = ()
    approval: Annotated[bool, Meta(description="true or false")] = False

    def matches(self, alarm: Alarm) -> bool:
        return (
            alarm.severity >= Severity[self.severity]  # first, because most alarms of a large cluster are notices
            and any(fnmatchcase(alarm.check, pattern) for pattern in self.checks)
            and any(fnmatchcase(alarm.subject, pattern) for pattern in self.subjects)
        )


class Breaker(msgspec.Struct, frozen=True):
    moves: Annotated[int, Meta(ge=0, description="a number of moves")] = 4
    window_s: Annotated[float, _SECONDS] = 3600.0
    nodes_percent: Annotated[float, _SHARE] = 10.0
    rank_window_s: Annotated[float, _SECONDS] = 3600.0
    undone: Annotated[int, Meta(ge=1, description="a number of moves from 1 on")] = 3
    back_off_s: Annotated[float, _SECONDS] = 300.0
    same_alarm_nodes: Annotated[int, Meta(ge=2, description="a number of nodes from 2 on")] = 3


class Spares(msgspec.Struct, frozen=True):
    floating: Annotated[bool, Meta(description="true or false")] = False
    rack: Annotated[str, Meta(pattern="^(ignore|prefer|require)$", description="ignore, prefer or require")] = "prefer"
    gang: Annotated[str, Meta(pattern="^(prefer|require)$", description="prefer or require")] = "prefer"
    preempt: Annotated[
        str, Meta(pattern="^(never|propose|move|suspend)$", description="never, propose, move or suspend")
    ] = "never"


class Job(msgspec.Struct, frozen=True):
    job: Annotated[str, Meta(min_length=1, description='a pattern for names of jobs, as "night-*"')]
    move: Annotated[bool, Meta(description="true or false")] = True
    independent: Annotated[bool, Meta(description="true or false")] = False
    priority: Annotated[int, Meta(description="a whole number")] = 0
    # A text, because it is a name or a number. Without it any user can have a job of such a name.
    user: Annotated[str, toml_file.text("the name or the number of a user, as a text", _user)] = ""

    def matches(self, rank: Rank) -> bool:
        return fnmatchcase(rank.job, self.job) and self.user in ("", str(rank.user_id))


class Validation(msgspec.Struct, frozen=True):
    command: Annotated[tuple[str, ...], Meta(description='a list: a program and its arguments, as ["/sbin/x"]')] = ()
    timeout_s: Annotated[float, _SECONDS] = 1800.0
    probation_s: Annotated[float, _SECONDS] = 3600.0


class Progress(msgspec.Struct, frozen=True):
    straggler_percent: Annotated[float, Meta(ge=1, le=100, description="a number from 1 to 100")] = 10.0
    pause_s: Annotated[float, _SECONDS] = 60.0
    stall_s: Annotated[float, _SECONDS] = 600.0


class Webhook(msgspec.Struct, frozen=True):
    """How alerts from outside are read (outside.py)."""

    node_labels: Annotated[tuple[str, ...], Meta(min_length=1, description='a list of labels, as ["node"]')] = (
        "node",
        "instance",
        "Hostname",
    )
    gpu_labels: Annotated[tuple[str, ...], Meta(description='a list of labels, as ["UUID"]')] = ("UUID",)
    severity_label: Annotated[str, Meta(min_length=1, description="the name of a label")] = "severity"
    severities: Annotated[
        dict[str, Literal["notice", "warning", "critical"]],
        Meta(description='a table with VALUE = "notice", "warning" or "critical"'),
    ] = {}


class Maintenance(msgspec.Struct, frozen=True):
    """A window of the maintenance calendar: maintenance.py says when it is."""

    nodes: Annotated[tuple[str, ...], Meta(min_length=1, description='a list of patterns, as ["rack7-*"]')]
    begin: Annotated[str, toml_file.text('a day and a time, as "2026-12-01T22:00"', _moment)]
    hours: Annotated[float, Meta(gt=0, le=160, description="a number of hours, up to 160")]
    repeat: Annotated[str, Meta(pattern="^(none|weekly)$", description="none or weekly")] = "none"
    reason: Annotated[str, Meta(max_length=200, description="a short text")] = ""
    lead_s: Annotated[float, Meta(ge=0, le=86400, description="a number of seconds, up to a day")] = 3600.0

    def matches(self, node: str) -> bool:
        return any(fnmatchcase(node, pattern) for pattern in self.nodes)


class Policy(msgspec.Struct, frozen=True):
    """The keys of the file. `origin` is not one of them."""

    rules: Annotated[tuple[Rule, ...], Meta(description="tables [[rules]]")] = ()
    jobs: Annotated[tuple[Job, ...], Meta(description="tables [[jobs]]")] = ()
    maintenance: Annotated[tuple[Maintenance, ...], Meta(description="tables [[maintenance]]")] = ()
    breaker: Annotated[Breaker, toml_file.table("a table", Breaker)] = Breaker()
    spares: Annotated[Spares, toml_file.table("a table", Spares)] = Spares()
    validation: Annotated[Validation, toml_file.table("a table", Validation)] = Validation()
    progress: Annotated[Progress, toml_file.table("a table", Progress)] = Progress()
    webhook: Annotated[Webhook, toml_file.table("a table", Webhook)] = Webhook()
    timezone: Annotated[str, toml_file.text("the name of a time zone", _zone)] = "UTC"
    unreachable_s: Annotated[float, _SECONDS] = 60.0
    origin: Annotated[str, Meta(description="")] = "the default policy"

    def rule_for(self, alarm: Alarm) -> Rule | None:
        """The first rule that matches."""
        return next((rule for rule in self.rules if rule.matches(alarm)), None)

    def job_for(self, rank: Rank) -> Job:
        """The first table that matches the rank's job, or else the defaults."""
        return next((job for job in self.jobs if job.matches(rank)), Job("*"))

    def without_suspending(self) -> Policy:
        """The same policy, by which ranks are moved to make room, and no job is suspended."""
        if self.spares.preempt != "suspend":
            return self
        return msgspec.structs.replace(self, spares=msgspec.structs.replace(self.spares, preempt="move"))

    def in_hours(self, rule: Rule, now: float) -> bool:
        """Whether the rule may act now. A rule without hours always may."""
        if not rule.hours:
            return True
        local = datetime.fromtimestamp(now, zoneinfo.ZoneInfo(self.timezone))
        return any(_covers(hours, local) for hours in rule.hours)


def read(path: Path) -> Policy:
    """The policy in a file. BadConfig lists everything that is wrong with it."""
    try:
        values = toml_file.load(path)
    except FileNotFoundError as error:
        raise NotFound(f"there is no policy file {path}", remedy="check --policy") from error
    return from_values(values, str(path))


def from_values(values: Mapping[str, Any], origin: str) -> Policy:
    problems: list[str] = []
    lists = ("rules", "jobs", "maintenance")
    rest = {key: value for key, value in values.items() if key not in lists}
    found = toml_file.read(Policy, rest, "", problems, without=(*lists, "origin"))
    rules = _tables(Rule, values.get("rules", []), "rules", problems)
    jobs = _tables(Job, values.get("jobs", []), "jobs", problems)
    windows = _tables(Maintenance, values.get("maintenance", []), "maintenance", problems)
    names = [rule.name for rule in rules]
    problems += [f"rules: two have the name {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    toml_file.check(problems, origin)
    return Policy(**found, rules=tuple(rules), jobs=tuple(jobs), maintenance=tuple(windows), origin=origin)


def _tables(struct: Any, tables: object, key: str, problems: list[str]) -> list[Any]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append(f"{key}: must be tables [[{key}]]")
        return []
    made = []
    for number, table in enumerate(tables, 1):
        before = len(problems)
        found = toml_file.read(struct, table, f"{key}[{number}].", problems)
        if len(problems) == before:
            made.append(struct(**found))
    return made


def _covers(hours: str, local: datetime) -> bool:
    """Whether a time is in the hours. Hours that end before they begin last until the next day."""
    found = _HOURS.fullmatch(hours)
    assert found is not None, "checked by read()"
    clock, first, last = local.strftime("%H:%M"), found["from"], found["to"]
    today, yesterday = local.weekday(), (local.weekday() - 1) % 7
    if first < last:
        return first <= clock < last and _on(found["days"], today)
    return (clock >= first and _on(found["days"], today)) or (clock < last and _on(found["days"], yesterday))


def _on(days: str | None, day: int) -> bool:
    """Whether a day of the week is in "Sat,Sun" or "Mon-Fri"."""
    if not days:
        return True
    for part in days.lower().split(","):
        first, _, last = part.partition("-")
        begin, end = _DAYS.index(first), _DAYS.index(last or first)
        if (day - begin) % 7 <= (end - begin) % 7:
            return True
    return False
