"""The autopilot's metrics: what a round shows, what the log counts, and the address where they are served."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from migrator.autopilot.decide import RankDecision
from migrator.autopilot.facts import AboutRank
from migrator.autopilot.metrics import Metrics
from migrator.autopilot.model import MoveState, NodeState, Severity
from migrator.autopilot.policy import Policy
from migrator.autopilot.store import Store
from snapshotd.api.errors import BadConfig, Usage
from snapshotd.api.metrics_http import MetricsServer
from tests.autopilot.conftest import PilotCluster, until
from tests.autopilot.worlds import acting, alarm, move, node, rank, world
from tests.cli.conftest import Migrator, a_rank


def values(text: bytes) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(migrator_\S+) (\S+)$", text.decode(), re.MULTILINE)}


def shown(metrics: Metrics) -> dict[str, float]:
    return values(metrics.text())


def test_a_round_shows_nodes_alarms_spares_and_waiting_ranks() -> None:
    metrics = Metrics(acting())
    stuck, going = rank(0, "node-1"), rank(1, "node-1")
    seen = world(
        node("node-1", 2, state=NodeState.TAINTED),
        node("node-2", 2, reachable=False),
        node("spare-1", 2),
        node("spare-2", 2, state=NodeState.SUSPECT),
        node("spare-3", 1),
        alarm("node-1"),
        alarm("node-1", subject="gpu:GPU-1"),
        alarm("node-1", "gpu-pcie", severity=Severity.WARNING),
        stuck,
        going,
        move(going, "spare-3", MoveState.INTENDED, gpus=1),
    )
    decided = [AboutRank(stuck, RankDecision.ALERT, "no place"), AboutRank(going, RankDecision.WAIT, "it moves")]
    metrics.round(seen, decided, {"rank 0": "no place"})
    found = shown(metrics)
    assert (found['migrator_nodes{state="healthy"}'], found['migrator_nodes{state="tainted"}']) == (3, 1)
    assert found['migrator_nodes{state="draining"}'] == 0
    assert found["migrator_nodes_unreachable"] == 1
    assert found['migrator_alarms{check="gpu-ecc",node="node-1",severity="critical"}'] == 2
    assert found['migrator_alarms{check="gpu-pcie",node="node-1",severity="warning"}'] == 1
    assert (found["migrator_spares"], found["migrator_spares_free"], found["migrator_spare_gpus_free"]) == (3, 1, 2)
    assert found['migrator_ranks_waiting{node="node-1"}'] == 1
    assert (found["migrator_ranks"], found["migrator_moves_running"], found["migrator_alerts"]) == (2, 1, 1)
    assert found["migrator_rules_acting"] == 1
    metrics.round(world(node("node-1")), [], {})
    assert not [name for name in shown(metrics) if name.startswith(("migrator_alarms", "migrator_ranks_waiting"))]


def test_every_counter_begins_at_zero() -> None:
    found = shown(Metrics(Policy()))
    for outcome in ("moved", "undone", "refused", "never_began", "lost"):
        assert found[f'migrator_moves_total{{outcome="{outcome}"}}'] == 0
    for decision in ("move", "alert", "suspect", "tainted", "draining"):
        assert found[f'migrator_decisions_total{{decision="{decision}"}}'] == 0
    assert found["migrator_rules_acting"] == 0


async def test_counters_are_those_of_the_log_and_survive_a_restart(tmp_path: Path) -> None:
    first, second = Metrics(Policy()), Metrics(Policy())
    async with Store.open(tmp_path) as store:
        store.on_record = first.count
        for number, (state, pause_s) in enumerate([(MoveState.MOVED, 0.3), (MoveState.UNDONE, 2.0)]):
            one = move(rank(number, "node-1"), "spare-1", MoveState.INTENDED, id=f"m-{number:012x}")
            await store.intend(one)
            await store.finish(one.id, state, "", pause_s)
        await store.set_node("node-1", NodeState.TAINTED, "a rule")
        await store.set_node("node-2", NodeState.TAINTED, "a person", "alice")
        await store.set_alerts({"node-3": "look"})
        await second.count_log(store)
    for metrics in (first, second):
        found = shown(metrics)
        assert found['migrator_moves_total{outcome="moved"}'] == 1
        assert found['migrator_moves_total{outcome="undone"}'] == 1
        assert found["migrator_move_pause_seconds_count"] == 1
        assert found['migrator_decisions_total{decision="move"}'] == 2
        assert found['migrator_decisions_total{decision="tainted"}'] == 1  # the other one is a person's
        assert found['migrator_decisions_total{decision="alert"}'] == 1


# ---------------------------------------------------------------------- the address


async def asked(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:  # closed before it has read everything
        return b""
    finally:
        writer.close()


async def one_metric() -> tuple[str, bytes]:
    return "text/x", b"metric 1\n"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = MetricsServer(one_metric)
    yield await server.start("127.0.0.1", 0, "--metrics")
    await server.close()


async def test_only_get_of_metrics_is_answered(address: str) -> None:
    answer = await asked(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 9\r\n")
    assert answer.endswith(b"\r\n\r\nmetric 1\n")
    assert (await asked(address, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
    assert (await asked(address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
    assert (await asked(address, b"\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
    assert await asked(address, b"x" * 100_000) == b""
    with pytest.raises(BadConfig, match="--metrics: cannot listen"):
        await MetricsServer(one_metric).start("127.0.0.1", int(address.rpartition(":")[2]), "--metrics")


@pytest.mark.parametrize(
    "address", ["9471", "localhost:9471", "127.0.0.1:", "127.0.0.1:65536", "::1:x", "127.0.0.1:-1"]
)
def test_an_address_that_is_none_is_refused(pilots: PilotCluster, migrator: Migrator, address: str) -> None:
    for option in ("--metrics", "--page"):
        ran = migrator("autopilot", "--policy", "p.toml", option, address)
        assert (ran.code, "is not an IP address and a port" in ran.err) == (Usage.exit_code, True)


def test_a_running_autopilot_serves_its_decisions(pilots: PilotCluster, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(
        '[[rules]]\nname = "gpus"\nchecks = ["gpu-*"]\naction = "move"\n[breaker]\nnodes_percent = 80\n'
    )
    pilots["node-1"].ranks.append(a_rank("node-1"))
    command = [sys.executable, "-m", "migrator.cli", "autopilot", "--policy", str(tmp_path / "policy.toml")]
    with subprocess.Popen(
        [*command, "--metrics", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"metrics at (http://\S+)", process.stdout.readline())
            assert found
            address = found[1]

            def scraped() -> dict[str, float]:
                with urllib.request.urlopen(address, timeout=60) as answer:
                    return values(answer.read())

            until("a round", lambda: scraped().get('migrator_nodes{state="healthy"}') == 5)
            assert scraped()["migrator_spares_free"] == 2
            pilots["node-1"].raise_alarm()
            until("the move", lambda: scraped()['migrator_moves_total{outcome="moved"}'] == 1)
            until("the state", lambda: scraped()['migrator_nodes{state="tainted"}'] == 1)
            assert scraped()['migrator_alarms{check="gpu-ecc",node="node-1",severity="critical"}'] == 1
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
