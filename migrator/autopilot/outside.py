"""Signals from outside the nodes: notifications of Alertmanager, and plain ones, as alarms of nodes. Pure.

A sender has a token, and may still be broken or in the hands of an attacker. Invariant: nothing passes that is larger than
what a node may report, no text can control a terminal, and an alarm from outside cannot be taken for one of a node: the
name of its check begins with "webhook-". Its age counts from its arrival, not from the time that the sender claims, because
limits of the policy depend on it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from migrator import formatting
from migrator.autopilot.model import Alarm, Severity
from migrator.autopilot.policy import Webhook
from migrator.cluster import Cluster
from snapshotd.api.addresses import split_address

PREFIX = "webhook-"
#: In one request, of one node at a time, and in one text.
MAX_ALERTS, MAX_ALARMS, MAX_CHARS = 2000, 100, 500
#: The same cause counts as seen again once in this time.
REPEAT_S = 60.0
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_FINGERPRINT = re.compile(r"[0-9A-Za-z]{1,64}")
_GPU = re.compile(r"GPU-[0-9a-f-]{36}")
_SEVERITIES = {
    **dict.fromkeys(("critical", "page"), Severity.CRITICAL),
    **dict.fromkeys(("notice", "info", "none"), Severity.NOTICE),
}


class Alert(msgspec.Struct):
    """What is used of one alert of a notification."""

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str] = {}
    fingerprint: str = ""


class Notification(msgspec.Struct):
    """The body that Alertmanager sends."""

    version: Literal["4"]
    alerts: Annotated[list[Alert], Meta(max_length=MAX_ALERTS)]


class Signal(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a plain signal."""

    node: Annotated[str, Meta(max_length=256)]
    check: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")]
    state: Literal["raised", "cleared"]
    subject: Annotated[str, Meta(pattern=r"^(host|(gpu|link|disk|rank):[A-Za-z0-9_./:-]{1,100})\Z")] = "host"
    severity: Literal["notice", "warning", "critical"] = "warning"
    text: Annotated[str, Meta(max_length=MAX_CHARS)] = ""
    remedy: Annotated[str, Meta(max_length=MAX_CHARS)] = ""


@dataclass(frozen=True)
class Reported:
    """One alarm, as a sender described it."""

    node: str
    key: str  # identifies the alarm among those from outside
    firing: bool
    check: str
    subject: str
    severity: Severity
    text: str
    remedy: str = ""


class Names:
    """The nodes by everything that a label may call them: names, hosts of endpoints, addresses in networks."""

    def __init__(self, cluster: Cluster) -> None:
        called: dict[str, set[str]] = {}
        for node, endpoint in cluster.nodes.items():
            for text in (_host(endpoint), *cluster.networks.get(node, {}).values()):
                called.setdefault(text, set()).add(node)
        # An address that two nodes have names neither. A name of a node always counts.
        self._nodes = {text: min(nodes) for text, nodes in called.items() if len(nodes) == 1}
        self._nodes |= {node: node for node in cluster.nodes}

    def node(self, text: str) -> str:
        """The node for "node-1", "node-1:9100", "[fe80::1]:9100" or "https://node-1:8443/x"; "" if there is none."""
        return self._nodes.get(text) or self._nodes.get(_host(text), "")


def _host(text: str) -> str:
    if "://" in text:
        try:
            return urlsplit(text).hostname or ""
        except ValueError:
            return ""
    try:
        return split_address(text)[0]
    except ValueError:
        return text


def of_alert(alert: Alert, names: Names, policy: Webhook) -> Reported | None:
    """The alarm of an alert. None: it names no node of the cluster."""
    labels = alert.labels
    found = (names.node(labels[label]) for label in policy.node_labels if label in labels)
    node = next((name for name in found if name), "")
    if not node:
        return None
    gpu = next((labels[label] for label in policy.gpu_labels if _GPU.fullmatch(labels.get(label, ""))), "")
    given = labels.get(policy.severity_label, "")
    wanted = policy.severities.get(given)
    severity = Severity[wanted.upper()] if wanted else _SEVERITIES.get(given.lower(), Severity.WARNING)
    name = _NOT_A_NAME.sub("-", labels.get("alertname", ""))[:100] or "alert"
    said = (alert.annotations.get(key, "") for key in ("summary", "description", "message"))
    text = next((each for each in said if each.strip()), f"{name} is firing")
    runbook = alert.annotations.get("runbook_url", "")
    return Reported(
        node,
        f"alert {_fingerprint(alert)}",
        alert.status == "firing",
        PREFIX + name,
        f"gpu:{gpu}" if gpu else "host",
        severity,
        _plain(text),
        _plain(f"see {runbook}") if runbook else "",
    )


def named_node(alert: Alert, policy: Webhook) -> str:
    """What an alert calls its node, for messages."""
    return _plain(next((alert.labels[label] for label in policy.node_labels if label in alert.labels), ""))[:100]


def of_signal(signal: Signal, names: Names) -> Reported | None:
    """The alarm of a plain signal. None: it names no node of the cluster."""
    node = names.node(signal.node)
    if not node:
        return None
    check = PREFIX + signal.check
    return Reported(
        node,
        f"signal {check} {signal.subject}",
        signal.state == "raised",
        check,
        signal.subject,
        Severity[signal.severity.upper()],
        _plain(signal.text) or f"{signal.check} was raised",
        _plain(signal.remedy),
    )


def _fingerprint(alert: Alert) -> str:
    """Alertmanager's own, which is a digest of the labels. Others that speak its format may have none."""
    if _FINGERPRINT.fullmatch(alert.fingerprint):
        return alert.fingerprint
    return hashlib.sha256(msgspec.json.encode(sorted(alert.labels.items()))).hexdigest()[:32]


def _plain(text: str) -> str:
    return formatting.plain(text.strip())[:MAX_CHARS]


# ---------------------------------------------------------------------- what changes


@dataclass(frozen=True)
class Change:
    """One alarm that is to be written, or removed if it has ended. `word`: what is recorded; "": nothing."""

    node: str
    key: str
    alarm: Alarm
    word: str

    @property
    def ended(self) -> bool:
        return self.word == "cleared"


@dataclass
class Plan:
    changes: list[Change] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def records(self) -> int:
        return sum(bool(change.word) for change in self.changes)


Known = dict[tuple[str, str], Alarm]  # alarms from outside, by node and key


def plan(known: Known, reported: Sequence[Reported], now: float) -> Plan:
    """What these reports change. As with the alarms of nodes, a severity only rises while an alarm stays."""
    made, alarms = Plan(), dict(known)
    counts = Counter(node for node, _ in alarms)
    for one in reported:
        place = (one.node, one.key)
        before = alarms.get(place)
        if not one.firing:
            outcome = "unchanged" if before is None else "cleared"
            if before is not None:
                del alarms[place]
                counts[one.node] -= 1
                made.changes.append(Change(*place, before, "cleared"))
        elif before is None and counts[one.node] >= MAX_ALARMS:
            outcome = "refused"
        else:
            outcome, after = _fired(before, one, now)
            if outcome != "unchanged":
                alarms[place] = after
                counts[one.node] += before is None
                made.changes.append(Change(*place, after, "raised" if outcome == "raised" else ""))
        made.outcomes[outcome] += 1
    return made


def _fired(before: Alarm | None, one: Reported, now: float) -> tuple[str, Alarm]:
    if before is None:
        return "raised", Alarm(one.node, one.check, one.subject, one.severity, one.text, now, now, 1, one.remedy)
    worse = one.severity > before.severity
    # The clocks of two autopilots differ a little, and an alert that both get is one.
    if not worse and abs(now - before.last_unix_s) < REPEAT_S:
        return "unchanged", before
    after = replace(before, last_unix_s=now, count=before.count + 1)
    if one.severity >= before.severity:
        after = replace(after, severity=one.severity, text=one.text, remedy=one.remedy)
    return ("raised" if worse else "repeated"), after


def matching(known: Known, node: str, check: str = "", subject: str = "") -> Known:
    """The alarms of a node, a check and a subject. Empty: of any check, of any subject."""
    return {
        place: alarm
        for place, alarm in known.items()
        if place[0] == node and check in ("", alarm.check) and subject in ("", alarm.subject)
    }
