"""Alerts and signals from outside: which node they are about, and which alarm."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.autopilot import outside, policy
from migrator.autopilot.model import Severity, cause_class
from migrator.autopilot.outside import MAX_ALARMS, REPEAT_S, Alert, Names, Reported, of_alert, plan
from migrator.cluster import Cluster
from tests.autopilot.worlds import NOW

CLUSTER = Cluster(
    "test",
    {"node-1": "10.0.0.1:7070", "node-2": "gpu2.example:7070", "node-3": "[fd00::3]:7070", "node-4": "10.0.0.9:7070"}
    | {"node-5": "10.0.0.9:7071"},
    networks={"node-1": {"data": "10.1.0.1"}},
)
NAMES = Names(CLUSTER)
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def alert(status: str = "firing", annotations: dict[str, str] | None = None, **labels: str) -> Alert:
    labels = {"alertname": "NodeHot", "instance": "node-1:9100", **labels}
    return Alert(status, labels, annotations or {}, "1a30ba71cca2921f")  # type: ignore[arg-type]


def reported(**fields: Any) -> Reported:
    values = {"node": "node-1", "key": "alert 1", "firing": True, "check": "webhook-hot", "subject": "host"}
    values |= {"severity": Severity.WARNING, "text": "it is hot"}
    return Reported(**{**values, **fields})


@pytest.mark.parametrize(
    ("label", "node"),
    [
        ("node-1", "node-1"),
        ("node-1:9100", "node-1"),
        ("10.0.0.1:9400", "node-1"),
        ("10.0.0.1", "node-1"),
        ("10.1.0.1:9400", "node-1"),
        ("gpu2.example:9100", "node-2"),
        ("https://gpu2.example:8443/probe", "node-2"),
        ("[fd00::3]:9100", "node-3"),
        ("fd00::3", "node-3"),
        ("10.0.0.9:9100", ""),  # of two nodes
        ("node-1.elsewhere", ""),
        ("node-9", ""),
        ("", ""),
        ("http://[", ""),
        (":", ""),
        ("\x1b[2J", ""),
    ],
)
def test_node_is_found_by_its_name_and_addresses(label: str, node: str) -> None:
    assert NAMES.node(label) == node


def test_first_label_that_names_a_node_counts() -> None:
    found = of_alert(alert(node="elsewhere", Hostname="node-2"), NAMES, policy.Webhook())
    assert found is not None
    assert found.node == "node-1"
    found = of_alert(
        alert(node="elsewhere", Hostname="node-2"), NAMES, policy.Webhook(node_labels=("node", "Hostname"))
    )
    assert found is not None
    assert found.node == "node-2"
    assert of_alert(alert(instance="node-9"), NAMES, policy.Webhook()) is None


def test_severity_gpu_text_and_runbook_are_taken_from_labels_and_annotations() -> None:
    rules = policy.Webhook(severities={"P1": "critical"})
    for given, severity in (
        ("critical", Severity.CRITICAL),
        ("page", Severity.CRITICAL),
        ("P1", Severity.CRITICAL),
        ("Info", Severity.NOTICE),
        ("warning", Severity.WARNING),
        ("unheard of", Severity.WARNING),
    ):
        found = of_alert(alert(severity=given), NAMES, rules)
        assert found is not None
        assert found.severity is severity, given
    told = {"description": "91 °C\x1b]0;owned\x07\nfor an hour" + "x" * 1000, "runbook_url": "https://r.example/hot"}
    found = of_alert(alert(annotations=told, alertname="Node Hot!/\x1b[2J", UUID=GPU), NAMES, rules)
    assert found is not None
    assert (found.check, found.subject) == ("webhook-Node-Hot-2J", f"gpu:{GPU}")
    assert found.text.startswith("91 °C?]0;owned?␤for an hour")
    assert found.text.isprintable()
    assert len(found.text) == outside.MAX_CHARS
    assert found.remedy == "see https://r.example/hot"
    plain = of_alert(alert(UUID="GPU-x"), NAMES, rules)
    assert plain is not None
    assert (plain.subject, plain.text) == ("host", "NodeHot is firing")
    assert (cause_class(plain.check, "host"), cause_class(found.check, found.subject)) == ("unknown", "hardware")


def test_alert_without_a_fingerprint_is_recognised_by_its_labels() -> None:
    keys = set()
    for one in (alert(), alert("resolved"), alert(gpu="1")):
        one.fingerprint = "' OR 1"
        found = of_alert(one, NAMES, policy.Webhook())
        assert found is not None
        keys.add(found.key)
    assert len(keys) == 2


def test_alarm_is_raised_once_and_counts_once_a_minute() -> None:
    first = plan({}, [reported(), reported(), reported(text="hotter")], NOW)
    assert dict(first.outcomes) == {"raised": 1, "unchanged": 2}
    (change,) = first.changes
    known = {("node-1", "alert 1"): change.alarm}
    assert (change.alarm.since_unix_s, change.alarm.count, first.records) == (NOW, 1, 1)
    assert dict(plan(known, [reported()], NOW - 0.01).outcomes) == {"unchanged": 1}  # by another autopilot's clock
    later = plan(known, [reported(text="hotter")], NOW + REPEAT_S)
    (change,) = later.changes
    assert (change.alarm.count, change.alarm.text, change.alarm.since_unix_s, later.records) == (2, "hotter", NOW, 0)
    worse = plan(known, [reported(severity=Severity.CRITICAL)], NOW + 1)
    assert [(one.word, one.alarm.severity) for one in worse.changes] == [("raised", Severity.CRITICAL)]
    better = plan(known, [reported(severity=Severity.NOTICE, text="cool")], NOW + REPEAT_S)
    assert [(one.word, one.alarm.severity, one.alarm.text) for one in better.changes] == [
        ("", Severity.WARNING, "it is hot")
    ]


def test_end_clears_only_what_was_raised_under_the_same_key() -> None:
    made = plan({}, [reported(), reported(key="alert 2"), reported(firing=False), reported(firing=False)], NOW)
    assert dict(made.outcomes) == {"raised": 2, "cleared": 1, "unchanged": 1}
    assert [(one.key, one.ended) for one in made.changes] == [("alert 1", False), ("alert 2", False), ("alert 1", True)]


def test_alarms_of_one_node_are_limited() -> None:
    made = plan({}, [reported(key=f"alert {number}") for number in range(MAX_ALARMS + 3)], NOW)
    assert dict(made.outcomes) == {"raised": MAX_ALARMS, "refused": 3}
