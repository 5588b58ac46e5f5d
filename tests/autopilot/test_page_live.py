"""`migrator autopilot --page` as a process, with fake daemons: an operator drains a node over HTTP, and its rank moves."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrator.autopilot.page import access
from snapshotd.api.errors import Usage
from tests.autopilot.conftest import PilotCluster, until
from tests.autopilot.pages import autopilot
from tests.cli.conftest import Migrator, a_rank


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text("")
    return file


@pytest.fixture
def url(pilots: PilotCluster, policy: Path) -> Iterator[str]:
    with autopilot(policy) as found:
        yield found


def post(url: str, token: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        return json.load(reply)


def test_signal_from_outside_makes_a_node_suspect_until_it_is_cleared(
    pilots: PilotCluster, policy: Path, tmp_path: Path
) -> None:
    policy.write_text('[[rules]]\nname = "outside"\nchecks = ["webhook-*"]\nseverity = "warning"\naction = "observe"\n')
    senders = tmp_path / "senders"
    senders.touch(mode=0o600)
    senders.write_text(f"monitoring {'s' * 32}\n")

    with autopilot(policy, "--webhook-token-file", str(senders)) as url:

        def state() -> Any:
            return next(one for one in get(f"{url}api/state")["nodes"] if one["name"] == "node-2")["state"]

        signal = {"node": "node-2", "check": "fans", "severity": "critical", "text": "a fan stands", "state": "raised"}
        assert post(f"{url}signal", "s" * 32, signal)["raised"] == 1
        until("the suspect node", lambda: state() == "suspect")
        assert post(f"{url}signal", "s" * 32, {**signal, "state": "cleared"})["cleared"] == 1
        until("the healthy node", lambda: state() == "healthy")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.load(reply)


def test_operator_drains_a_node_on_the_page(pilots: PilotCluster, url: str) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))

    def node() -> Any:
        return next(one for one in get(f"{url}api/state")["nodes"] if one["name"] == "node-1")

    until("the rank on the page", lambda: node()["ranks"])
    token = (pilots.path.parent / "state" / access.FILE).read_text().split()[1]
    done = post(f"{url}api/actions", token, {"action": "drain", "node": "node-1", "reason": "a fan"})
    assert done == {"done": "node-1 is being drained (order 1)"}
    until("the drained node", lambda: node()["state"] == "drained")
    assert set(pilots.places().values()) == {"spare-1"}
    kinds = [record["kind"] for record in get(f"{url}api/timeline")["records"]]
    assert [kind for kind in reversed(kinds) if kind in ("page", "order", "intent", "result")] == [
        "page",
        "page",
        "order",
        "intent",
        "result",
    ]


@pytest.mark.parametrize(
    "options",
    [
        ("--page", "10.0.0.1:80", "--page-plain-http"),
        ("--page", "127.0.0.1:0"),
        ("--page-plain-http",),
        ("--page-cert", "x"),
    ],
)
def test_page_that_must_not_be_served_is_refused_before_the_start(
    pilots: PilotCluster, migrator: Migrator, policy: Path, options: tuple[str, ...]
) -> None:
    assert migrator("autopilot", "--policy", str(policy), *options).code == Usage.exit_code
    assert not (pilots.path.parent / "state").exists()
