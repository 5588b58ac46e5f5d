"""The webhook over real HTTP: what it takes, what it refuses, and what an autopilot makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from migrator.autopilot import chain, operate, outside, policy, watcher
from migrator.autopilot.engine import Engine
from migrator.autopilot.model import NodeState, Order, Severity
from migrator.autopilot.outside import Names
from migrator.autopilot.page import webhook
from migrator.autopilot.page.access import Tokens
from migrator.autopilot.page.webhook import Webhook
from migrator.autopilot.store import Store
from migrator.cluster import Cluster
from snapshotd.api.errors import Unreachable
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.pages import TOKEN, Answer, Page, served, small
from tests.autopilot.test_engine import POLICY, results, running, until
from tests.cli.conftest import a_rank

SENDER = "fedcba9876543210" * 4
CLUSTER = Cluster("test", {"node-1": "10.0.0.1:7070", "spare-1": "10.0.0.2:7070"})


def group(*alerts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A notification as Alertmanager sends it."""
    labels = {"alertname": "GpuHot", "severity": "critical"}
    return {
        "receiver": "migrator",
        "status": "firing",
        "alerts": list(alerts),
        "groupLabels": {"alertname": "GpuHot"},
        "commonLabels": labels,
        "commonAnnotations": {},
        "externalURL": "http://alerts.example:9093",
        "version": "4",
        "groupKey": '{}:{alertname="GpuHot"}',
        "truncatedAlerts": 0,
        **more,
    }


def alert(node: str = "node-1", status: str = "firing", number: int = 1, **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": "GpuHot", "instance": f"{node}:9400", "severity": "critical", **labels},
        "annotations": {"summary": "a GPU is too hot"},
        "startsAt": "2026-11-17T09:52:26.739266876+02:00",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus.example:9090/graph?g0.expr=x",
        "fingerprint": f"{number:016x}",
    }


def plain(**fields: Any) -> dict[str, Any]:
    return {"node": "node-1", "check": "fans", "state": "raised", "text": "a fan stands", **fields}


@dataclass
class Hook:
    page: Page
    counted: Counter[str] = field(default_factory=Counter)

    async def post(self, path: str, body: Any, token: str = SENDER, **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(self.page.ask, "POST", path, named, content)

    async def alarms(self) -> list[tuple[str, str, str]]:
        found = await self.page.store.own_alarms()
        assert {source for source, _ in found} <= {"webhook"}
        return [(one.node, one.check, one.subject) for _, one in found]


@contextlib.asynccontextmanager
async def hooked(folder: Path) -> AsyncIterator[Hook]:
    file = folder / "senders"
    file.touch(mode=0o600)
    file.write_text(f"alertmanager {SENDER}\n")
    counted: Counter[str] = Counter()

    def made(store: Store) -> Any:
        def count(outcome: str, number: int) -> None:
            counted[outcome] += number

        return Webhook(store, Tokens.read(file), Names(CLUSTER), policy.Webhook(), count).routes()

    async with served(folder, small(), more=made) as page:
        yield Hook(page, counted)


async def test_alert_is_an_alarm_of_its_node_until_it_is_resolved_across_restarts(tmp_path: Path) -> None:
    async with hooked(tmp_path) as hook:
        answer = await hook.post("/alertmanager", group(alert(), alert(number=2, gpu="1")))
        assert (answer.status, answer.json["raised"]) == (200, 2)
        again = await hook.post("/alertmanager", group(alert(), alert(number=2, gpu="1")))
        assert again.json["unchanged"] == 2
    async with hooked(tmp_path) as hook:
        assert await hook.alarms() == [("node-1", "webhook-GpuHot", "host")] * 2
        (first, *_) = (await hook.page.store.load()).alarms
        assert (first.severity, first.text) == (Severity.CRITICAL, "a GPU is too hot")
        answer = await hook.post("/alertmanager", group(alert(status="resolved"), status="resolved"))
        assert answer.json["cleared"] == 1
        assert len(await hook.alarms()) == 1
        records = [one for one in await hook.page.store.events() if one.kind == "signal"]
        assert [(one.node, one.data["kind"], one.data["by"]) for one in records] == [
            ("node-1", "raised", "alertmanager (webhook)"),
            ("node-1", "raised", "alertmanager (webhook)"),
            ("node-1", "cleared", "alertmanager (webhook)"),
        ]
        assert all(SENDER not in one.text + json.dumps(one.data) for one in records)


async def test_plain_signal_is_raised_and_cleared(tmp_path: Path) -> None:
    async with hooked(tmp_path) as hook:
        answer = await hook.post("/signal", plain(node="10.0.0.1", subject="disk:sda", severity="notice"))
        assert (answer.status, answer.json) == (200, {"node": "node-1", "check": "webhook-fans", "raised": 1})
        assert await hook.alarms() == [("node-1", "webhook-fans", "disk:sda")]
        assert (await hook.post("/signal", plain(state="cleared"))).json["unchanged"] == 1  # another subject
        assert (await hook.post("/signal", plain(state="cleared", subject="disk:sda"))).json["cleared"] == 1
        assert await hook.alarms() == []


async def test_unknown_nodes_are_answered_and_counted_but_not_recorded(tmp_path: Path) -> None:
    async with hooked(tmp_path) as hook:
        alerts = [alert(f"other-{number}\x1b[2J", number=number) for number in range(20)]
        answer = await hook.post("/alertmanager", group(*alerts, alert(number=99)))
        assert (answer.status, answer.json["raised"], answer.json["unknown_node"]) == (200, 1, 20)
        assert len(answer.json["unknown_nodes"]) == webhook.SHOWN
        assert all(name.isprintable() for name in answer.json["unknown_nodes"])
        refused = await hook.post("/signal", plain(node="other"))
        assert (refused.status, refused.json["error"]) == (404, "the cluster has no such node")
        assert hook.counted == {"raised": 1, "unknown_node": 21}
        assert [one.node for one in await hook.page.store.events()] == ["node-1"]


async def test_request_without_a_senders_token_is_refused_without_a_flood_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hooked(tmp_path) as hook:
        for number in range(30):
            wrong = ("", "x", TOKEN, f"{SENDER}0")[number % 4]  # TOKEN is an operator's, who acts and does not report
            assert (await hook.post("/alertmanager", group(alert()), wrong)).status == 401
        assert (await hook.post("/signal", plain(), Authorization="Basic eA==")).status == 401
        assert (await hook.post("/signal", plain(), Origin="https://evil.example")).status == 403
        assert (await hook.page.act("drain", "node-1", SENDER)).status == 401  # a sender does not act
        assert (await hook.page.get("/signal")).status == 405
        assert await hook.page.store.events() == []
        assert hook.counted == {"unauthorised": 31}
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) <= webhook.MAX_COMPLAINTS + 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"version": "4", "alerts": ' + b'{"a":' * 50_000,
        b'{"version": "4", "alerts": NaN}',
        json.dumps({**group(alert()), "version": "5"}).encode(),
        json.dumps(group({**alert(), "status": "unknown"})).encode(),
        json.dumps(group({**alert(), "labels": {"instance": 1e308}})).encode(),
        json.dumps(group({**alert(), "labels": {"instance": None}})).encode(),
        json.dumps(group(*[alert()] * (outside.MAX_ALERTS + 1))).encode(),
        json.dumps(group({**alert(), "fingerprint": 10**400})).encode(),
        b'{"version": "4", "alerts": [{"status": "firing", "labels": {"instance": "\\ud800"}}]}',
        b'{"version": "4", "alerts": [{"status": "firing", "labels": {"instance": "\xff\xfe"}}]}',
    ],
)
async def test_malformed_notification_is_refused(tmp_path: Path, body: bytes) -> None:
    async with hooked(tmp_path) as hook:
        answer = await hook.post("/alertmanager", body)
        assert answer.status in (400, 413), answer.body
        assert answer.json["error"].isprintable()
        assert (await hook.page.store.events(), await hook.alarms()) == ([], [])
        assert hook.counted == {"refused": 1}


async def test_malformed_signal_is_refused(tmp_path: Path) -> None:
    async with hooked(tmp_path) as hook:
        for wrong in (
            {"state": "maybe"},
            {"check": ""},
            {"check": "x" * 101},
            {"check": "\x1b[2J"},
            {"subject": "planet:earth"},
            {"subject": "gpu:" + "x" * 101},
            {"severity": "mortal"},
            {"severity": 1e308},
            {"text": "x" * 501},
            {"text": 10**500},
            {"node": "n" * 300},
            {"extra": 1},
        ):
            answer = await hook.post("/signal", plain(**wrong))
            assert answer.status == 400, wrong
        assert (await hook.post("/signal", b"x" * (webhook.BODY_BYTES + 1))).status == 413
        assert await hook.page.store.events() == []


async def test_text_that_controls_terminals_is_made_harmless(tmp_path: Path) -> None:
    async with hooked(tmp_path) as hook:
        assert (await hook.post("/signal", plain(text="\x1b]0;owned\x07\u202e", remedy="\x1b[2J"))).status == 200
        (alarm,) = (await hook.page.store.load()).alarms
        assert (alarm.text, alarm.remedy) == ("?]0;owned??", "?[2J")


async def test_flood_of_changes_is_refused_and_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BURST", 5)
    monkeypatch.setattr(watcher, "AN_HOUR", 0)
    async with hooked(tmp_path) as hook:
        checks = [f"fan-{number}" for number in range(20)]
        answers = [await hook.post("/signal", plain(check=check)) for check in checks]
        assert [one.status for one in answers] == [200] * 5 + [429] * 15
        assert answers[-1].headers["retry-after"] == "600"
        kinds = Counter(one.kind for one in await hook.page.store.events())
        assert kinds == {"signal": 5, "flood": 1}
        assert len(await hook.alarms()) == 5
        assert (await hook.post("/signal", plain(check="fan-1"))).status == 200  # what is known already is taken


async def test_state_that_is_out_of_reach_is_answered_with_a_status_that_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path) as hook:

        async def away(*given: Any) -> None:
            raise Unreachable("etcd does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(hook.page.store, "_change", away)
            answer = await hook.post("/alertmanager", group(alert()))
            assert (answer.status, answer.json["error"]) == (503, "etcd does not answer")
        assert (await hook.post("/alertmanager", group(alert()))).json["raised"] == 1


async def test_requests_that_failed_use_up_nothing_of_the_senders_allowance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "BURST", 2)
    monkeypatch.setattr(watcher, "AN_HOUR", 0)
    async with hooked(tmp_path) as hook:

        async def away(*given: Any) -> None:
            raise Unreachable("etcd does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(hook.page.store, "_change", away)
            answers = [await hook.post("/signal", plain(check=f"fan-{number}")) for number in range(5)]
            assert [one.status for one in answers] == [503] * 5
        answers = [await hook.post("/signal", plain(check=f"fan-{number}")) for number in range(2)]
        assert [one.status for one in answers] == [200] * 2
        with monkeypatch.context() as patched:
            patched.setattr(hook.page.store, "_change", away)
            assert (await hook.post("/signal", plain(check="fan-9"))).status == 503  # the flood cannot be recorded
        assert (await hook.post("/signal", plain(check="fan-9"))).status == 429
        assert Counter(one.kind for one in await hook.page.store.events()) == {"signal": 2, "flood": 1}


async def test_body_that_does_not_arrive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "BODY_S", 0.2)
    async with hooked(tmp_path) as hook:
        place = urlsplit(hook.page.url)

        def slow() -> bytes:
            with socket.create_connection((str(place.hostname), place.port), timeout=60) as connection:
                head = f"POST /signal HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {SENDER}\r\n"
                connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
                return connection.recv(4096)

        assert b" 408 " in await asyncio.to_thread(slow)


# ---------------------------------------------------------------------- with an autopilot


async def test_rule_moves_ranks_for_an_alert_and_return_clears_it(pilots: PilotCluster) -> None:
    rules = policy.from_values(
        {"rules": [{"name": "outside", "checks": ["webhook-*"], "action": "move"}], "breaker": {"nodes_percent": 80}},
        "test",
    )
    pilots["node-1"].ranks.append(a_rank("node-1"))
    one = outside.Reported("node-1", "alert 1", True, "webhook-GpuHot", "host", Severity.CRITICAL, "too hot")
    async with running(pilots, rules) as store:
        assert await store.take_signals([one], "alertmanager (webhook)") == {"raised": 1}
        assert await results(store) == [("spare-1", "moved")]
        used = await operate.use_again(store, "node-1", "alice")
        assert used.alarms == ["webhook-GpuHot"]  # as with the alarms of a node, untaint does not clear it
        order = await store.give_order(Order(0, "return", "node-1", by="alice"), NodeState.VALIDATING)

        async def ended() -> bool:
            return (await store.order(order.id)).ended_unix_s > 0

        await until("the end of the return", ended)
        assert (await store.load()).alarms == ()
        cleared = [record.data["by"] for record in await store.events() if record.data.get("kind") == "cleared"]
        assert cleared == ["alice"]


async def test_old_time_of_a_sender_does_not_evade_the_check_for_systematic_trouble(pilots: PilotCluster) -> None:
    names = Names(Cluster.read(pilots.path))
    found = [
        outside.of_alert(outside.Alert("firing", {"node": f"node-{number}", "severity": "page"}), names, POLICY.webhook)
        for number in (1, 2, 3)
    ]
    async with Store.open(pilots.path.parent / "state") as store:
        await store.take_signals([one for one in found if one is not None], "alertmanager (webhook)")
        engine = Engine(Cluster.read(pilots.path), POLICY, store)
        world = await engine.world()
        assert len({alarm.node for alarm in world.alarms}) == 3
        assert all(store.now() - alarm.since_unix_s < 60 for alarm in world.alarms)
        assert chain.problems(await store.events()) == []
