"""Measures the autopilot with a large simulated cluster: how long after a fault it has decided, and the page shows it.

    python -m integration.bench_autopilot --nodes 1024 --signals 10000 --seconds 60

Engine, decisions, store (on disk) and page (over HTTP, with a viewer that does what a browser does) are the real ones.
integration/simulated_cluster.py has what is not. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from integration.simulated_cluster import GPUS, JOB_NODES, SimulatedCluster, SimulatedEngine, simulated
from migrator.autopilot import chain, policy
from migrator.autopilot.chain import Record
from migrator.autopilot.page.access import Tokens
from migrator.autopilot.page.feed import Feed
from migrator.autopilot.page.serving import Place, serving
from migrator.autopilot.page.view import Phases
from migrator.autopilot.store import Store

POLICY = policy.from_values(
    {
        "rules": [{"name": "critical", "severity": "critical", "action": "move"}],
        # Without limits: every fault must lead to a move, so that its time can be measured.
        "breaker": {"moves": 100_000, "nodes_percent": 100, "same_alarm_nodes": 100_000},
    },
    "the benchmark",
)
#: Of page.js: the least time between two requests for the state.
REFRESH_S = 0.5
#: For what is under way when the signals end.
SETTLE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024, help=f"nodes with {GPUS} ranks each (default: 1024)")
    parser.add_argument("--spares", type=int, default=64)
    parser.add_argument("--signals", type=int, default=10_000, help="signals in a minute (default: 10000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they come (default: 60)")
    parser.add_argument("--viewers", type=int, default=1, help="open pages (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--viewer", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.viewer:
        view(options.viewer)
        return 0
    asyncio.run(measure(options))
    return 0


class Times:
    """When things happened, by node (monotonic)."""

    def __init__(self) -> None:
        self.failed: dict[str, float] = {}
        self.tainted: dict[str, float] = {}
        self.intended: dict[str, float] = {}
        self.shown: dict[str, float] = {}

    def note(self, record: Record) -> None:
        now = time.monotonic()
        if record.kind == "state" and record.data["to"] == "tainted":
            self.tainted[record.node] = now
        elif record.kind == "intent":
            self.intended.setdefault(record.node, now)


async def measure(options: argparse.Namespace) -> None:
    cluster, random, times = simulated(options.nodes, options.spares), Random(options.seed), Times()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        async with Store.open(Path(folder)) as store:
            engine = SimulatedEngine(cluster, POLICY, store)
            phases = Phases()
            feed = Feed(store, engine.shown_world, POLICY.spares, phases)

            def on_record(record: Record) -> None:
                times.note(record)
                feed.wake()

            store.on_record = on_record
            place, stop = Place("127.0.0.1", 0), asyncio.Event()
            tokens = Tokens({secrets.token_bytes(32): "nobody"})
            began = time.monotonic()
            async with serving(place, place.listen(), feed, tokens, list(cluster.nodes)) as url:
                running = asyncio.create_task(engine.run(stop))
                await first_round(engine)
                print(f"first round after {time.monotonic() - began:.1f} s", flush=True)
                viewers = [viewer(url) for _ in range(options.viewers)]
                await asyncio.sleep(2)
                cpu, wall = time.process_time(), time.monotonic()
                sent = await signals(cluster, options, random, times)
                cpu, wall = time.process_time() - cpu, time.monotonic() - wall
                await asyncio.sleep(SETTLE_S)
                for one in viewers:
                    one.terminate()
                stop.set()
                await running
            for one in viewers:
                for line in one.communicate()[0].splitlines():
                    said = json.loads(line)
                    times.shown[said["node"]] = max(said["at"], times.shown.get(said["node"], 0.0))
            records = await store.events()
            assert chain.problems(records) == []
            report(options, times, sent, len(records), cpu / wall)


async def first_round(engine: SimulatedEngine) -> None:
    done = asyncio.Event()
    engine.on_round = lambda world, decided, alerts: done.set()
    await done.wait()


async def signals(cluster: SimulatedCluster, options: argparse.Namespace, random: Random, times: Times) -> int:
    """Sends quiet signals at the asked rate, and one fault in a second, each on another node. Returns how many."""
    working = [one for one in cluster.daemons.values() if not one.spare]
    # One node of each job: two ranks of a job are not moved at a time, and the second one would wait for the first.
    failing = [random.choice(working[at : at + JOB_NODES]) for at in range(0, len(working), JOB_NODES)]
    random.shuffle(failing)
    failing = failing[: int(options.seconds)]
    noisy = [one for one in working if one not in failing] or working
    began, sent = time.monotonic(), 0
    while (gone_s := time.monotonic() - began) < options.seconds:
        while len(times.failed) < min(gone_s, len(failing)):
            one = failing[len(times.failed)]
            one.fail(random.randrange(GPUS))
            times.failed[one.name] = time.monotonic()
            sent += 1
        while sent < gone_s * options.signals / 60:
            random.choice(noisy).noise(random)
            sent += 1
        await asyncio.sleep(0.01)
    return sent


def viewer(url: str) -> subprocess.Popen[str]:
    """An open page, in a process of its own, so that its work does not count."""
    command = [sys.executable, "-m", "integration.bench_autopilot", "--viewer", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def view(url: str) -> None:
    """Does what page.js does, and prints when a node is first shown as tainted."""
    place, seen = urlsplit(url), set[str]()
    assert place.hostname is not None
    news = http.client.HTTPConnection(place.hostname, place.port, timeout=600)
    news.request("GET", "/api/news")
    state = http.client.HTTPConnection(place.hostname, place.port, timeout=600)
    for line in news.getresponse():
        if not line.startswith(b"event: state"):
            continue
        began = time.monotonic()
        state.request("GET", "/api/state", headers={"Accept-Encoding": "gzip"})
        answer = state.getresponse()
        body = answer.read()
        if answer.getheader("Content-Encoding") == "gzip":
            body = zlib.decompress(body, wbits=31)
        for node in json.loads(body)["nodes"]:
            if node["state"] == "tainted" and node["name"] not in seen:
                seen.add(node["name"])
                print(json.dumps({"node": node["name"], "at": time.monotonic()}), flush=True)
        time.sleep(max(0.0, REFRESH_S - (time.monotonic() - began)))


def report(options: argparse.Namespace, times: Times, sent: int, records: int, share: float) -> None:
    print(f"{options.nodes} nodes × {GPUS} ranks, {options.spares} spares, {options.viewers} viewers")
    print(f"{sent} signals in {options.seconds:.0f} s, {len(times.failed)} of them faults; {records} records")
    for name, since, until in (
        ("fault → taint recorded", times.failed, times.tainted),
        ("fault → move intended", times.failed, times.intended),
        ("fault → page shows it", times.failed, times.shown),
        ("taint recorded → page shows it", times.tainted, times.shown),
    ):
        found = sorted(until[node] - since[node] for node in since if node in until)
        if not found:
            print(f"  {name:32}  none of {len(since)}")
            continue
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        middle = statistics.median(found)
        print(
            f"  {name:32}  median {middle * 1000:6.0f} ms  p99 {p99 * 1000:6.0f} ms  max {found[-1] * 1000:6.0f} ms"
            f"  ({len(found)} of {len(since)})"
        )
    status = Path("/proc/self/status").read_text()
    memory = {key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("VmRSS", "VmHWM")}  # type: ignore[index]
    print(f"  CPU {share * 100:.0f} % of a core, memory {memory['VmRSS']:.0f} MiB (peak {memory['VmHWM']:.0f} MiB)")


if __name__ == "__main__":
    sys.exit(main())
