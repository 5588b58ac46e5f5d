"""Several autopilots as processes, with a real etcd and fake daemons: one acts, another one takes over, never two."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import BadConfig, Unreachable, Usage
from tests.autopilot.conftest import NODES, PilotCluster, until
from tests.autopilot.etcd_server import EtcdServer, free_port
from tests.cli.conftest import Migrator, a_rank

POLICY = """
[[rules]]
name = "act"
checks = ["gpu-ecc"]
severity = "critical"
action = "move"

[breaker]
nodes_percent = 80
"""


class Pilot:
    """One `migrator autopilot` with a state folder of its own, as on a machine of its own."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.state, self._log = folder / name, folder / f"{name}.log"
        policy = folder / "policy.toml"
        policy.write_text(POLICY)
        command = [sys.executable, "-m", "migrator.cli", "autopilot", "--policy", str(policy), "--json"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--state", str(self.state), *options], stdout=log, stderr=log)

    def said(self) -> list[dict[str, object]]:
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def roles(self) -> list[str]:
        return [str(one["text"]) for one in self.said() if one["kind"] == "role"]

    def says(self, text: str) -> None:
        until(f"{self.state.name} to say {text!r}", lambda: any(role.startswith(text) for role in self.roles()))

    def shows(self, kind: str) -> int:
        return sum(one["kind"] == kind for one in self.said())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(60)


@pytest.fixture
def start(pilots: PilotCluster, etcd: EtcdServer, tmp_path: Path) -> Iterator[Callable[..., Pilot]]:
    started: list[Pilot] = []

    def begin(name: str, *options: str) -> Pilot:
        started.append(Pilot(tmp_path, name, "--etcd", etcd.url, *options))
        return started[-1]

    yield begin
    for pilot in started:
        pilot.end()


def all_seen(pilots: PilotCluster) -> bool:
    return all(pilots[node].called("GetHealth") for node in NODES)


@pytest.mark.sampled(1, group="fail-over")
def test_when_the_leader_is_killed_another_one_acts_within_seconds(
    pilots: PilotCluster, start: Callable[..., Pilot], migrator: Migrator, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, node in enumerate(("node-1", "node-2")):
        pilots[node].ranks.append(a_rank(node, number, job=f"job-{number}"))
    port, page = free_port(), free_port()
    first = start("first")
    first.says("leads")
    assert first.shows("start") == 1
    second = start("second", "--metrics", f"127.0.0.1:{port}", "--page", f"127.0.0.1:{page}", "--page-plain-http")
    second.says("stands by: ")

    def metric(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    def alerts() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/api/state", timeout=60) as answer:
            return json.dumps(json.load(answer)["alerts"])

    assert "stands by: " in alerts(), "the page says that another one leads"
    assert (metric("migrator_leader "), metric("migrator_store_reachable ")) == (0.0, 1.0)
    # An operator on the machine of the other one gives an order: the leader carries it out.
    drained = migrator("drain", "node-1", "--state", str(second.state), "--json")
    assert drained.json["complete"], drained
    assert pilots.places()["job-0-0-00000001"].startswith("spare")
    until("the record on the standby", lambda: second.shows("result") == 1)
    assert pilots.begun() == 1

    first.process.kill()
    killed_s = time.monotonic()
    pilots["node-2"].raise_alarm()
    until("the second move to begin", lambda: pilots.begun() == 2)
    took_s = time.monotonic() - killed_s
    with capsys.disabled():
        print(f"{took_s:.1f} s from kill -9 of the leader to the first call of a move by the other one")
    assert took_s < 30
    until("its end", lambda: second.shows("result") == 2)
    until("the metric", lambda: metric("migrator_leader ") == 1.0)
    until("the page", lambda: "stands by: " not in alerts())
    assert pilots.begun() == 2
    verified = migrator("report", "verify", "--state", str(second.state), "--json")
    assert verified.json["valid"]

    second.process.send_signal(signal.SIGTERM)  # it gives its lease back
    stopped_s = time.monotonic()
    third = start("third")
    third.says("leads")
    assert second.process.wait(60) == 0
    with capsys.disabled():
        print(f"{time.monotonic() - stopped_s:.1f} s from SIGTERM of the leader until a new autopilot leads")
    assert migrator("report", "verify", "--state", str(third.state), "--json").json["valid"]


@pytest.mark.sampled(1, group="fail-over")
def test_leader_that_was_stopped_and_etcd_that_was_restarted(
    pilots: PilotCluster, start: Callable[..., Pilot], etcd: EtcdServer
) -> None:
    for number, node in enumerate(("node-1", "node-2")):
        pilots[node].ranks.append(a_rank(node, number, job=f"job-{number}"))
    first = start("first")
    first.says("leads")
    second = start("second")
    second.says("stands by: ")
    until("all nodes to be watched", lambda: all_seen(pilots))
    first.process.send_signal(signal.SIGSTOP)
    second.says("leads")
    pilots["node-1"].raise_alarm()
    until("the move", lambda: second.shows("result") == 1)
    first.process.send_signal(signal.SIGCONT)
    first.says("does not lead any more")
    first.says("stands by: ")
    until("the record", lambda: first.shows("result") == 1)
    assert pilots.begun() == 1

    etcd.kill()
    for pilot in (first, second):
        pilot.says("decides nothing until etcd answers")
    second.says("does not lead any more")
    pilots["node-2"].raise_alarm()
    time.sleep(2)
    assert pilots.begun() == 1, "nothing is decided without etcd"
    etcd.start()
    until("the second move", lambda: first.shows("result") == second.shows("result") == 2)
    assert pilots.begun() == 2
    assert sorted(node.partition("-")[0] for node in pilots.places().values()) == ["spare", "spare"]


@pytest.mark.sampled(1, group="fail-over")
def test_leaders_that_stand_still_during_a_move_do_not_go_on_with_it(
    pilots: PilotCluster, start: Callable[..., Pilot], migrator: Migrator
) -> None:
    for number, node in enumerate(("node-1", "node-2")):
        pilots[node].ranks.append(a_rank(node, number, job=f"job-{number}"))
    first = start("first")
    first.says("leads")
    second = start("second")
    second.says("stands by: ")
    # Before the daemons have heard of the move: the next leader finds that it never began, and begins another one.
    pilots["node-1"].blocked.add("Inspect")
    pilots["node-1"].raise_alarm()
    until("preflight", lambda: pilots["node-1"].called("Inspect"))
    first.process.send_signal(signal.SIGSTOP)
    pilots["node-1"].blocked.clear()
    second.says("leads")
    until("the move of the second one", lambda: second.shows("result") == 2)
    first.process.send_signal(signal.SIGCONT)
    first.says("does not lead any more")
    first.says("stands by: ")
    assert states(second) == ["never began", "moved"]
    assert pilots.begun() == len(pilots["spare-1"].called("Prepare")) == 1

    # In the middle of a move: the next leader waits until the daemons have ended it.
    pilots["node-2"].blocked.add("Stream")
    pilots["node-2"].raise_alarm()
    until("the stream", lambda: pilots["node-2"].called("Stream"))
    second.process.send_signal(signal.SIGSTOP)
    until("the first one to lead again", lambda: first.roles().count("leads") == 2)
    seen = len(pilots["node-2"].called("ListMoves"))
    until("the new leader to ask for the move", lambda: len(pilots["node-2"].called("ListMoves")) > seen + 3)
    assert pilots.begun() == 2, "the daemons still work on it"
    second.process.send_signal(signal.SIGCONT)
    second.says("does not lead any more")
    until("the move to be undone", lambda: pilots["node-2"].called("Abort"))
    pilots["node-2"].blocked.clear()
    until("the results", lambda: first.shows("result") == 4)
    assert states(first) == ["never began", "moved", "undone", "moved"]
    assert pilots.begun() == 3
    assert migrator("report", "verify", "--state", str(second.state), "--json").json["valid"]


def states(pilot: Pilot) -> list[str]:
    """How moves ended."""
    results = [one["data"] for one in pilot.said() if one["kind"] == "result"]
    return [result["state"] for result in results if isinstance(result, dict)]


def test_states_that_cannot_be_shared_are_refused_with_a_remedy(
    pilots: PilotCluster, start: Callable[..., Pilot], migrator: Migrator, etcd: EtcdServer, tmp_path: Path
) -> None:
    start("first").says("leads")
    assert migrator("taint", "node-1", "--state", str(tmp_path / "alone")).code == 0
    policy = str(tmp_path / "policy.toml")
    run = ("autopilot", "--policy", policy, "--state", str(tmp_path / "alone"))
    refused = migrator(*run, "--etcd", etcd.url)
    assert refused.code == BadConfig.exit_code
    assert "has one of its own" in refused.err
    assert "--etcd-prefix" in refused.err
    away = migrator(*run, "--etcd", f"http://127.0.0.1:{free_port()}")
    assert away.code == Unreachable.exit_code
    assert "etcdctl endpoint health" in away.err
    assert migrator(*run, "--etcd-prefix", "/x").code == Usage.exit_code
    assert migrator(*run, "--etcd", "nowhere").code == Usage.exit_code
    assert not (tmp_path / "alone" / "etcd.json").exists()
