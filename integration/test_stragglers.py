"""A rank that becomes slow is found from the counters of the shim alone, and the autopilot moves it away by itself.

Daemons, CRIU, shim and autopilot are real; the NCCL library is a fake, and the slow node is a sleep in the workload.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from integration.harness import cluster, until
from integration.nccl_nodes import NcclJob
from integration.pilot import Pilot

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

PLACES, SLOW, TARGET = ("node-1", "node-2", "node-2"), 1, "spare-1"
POLICY = """
[[rules]]
name = "slow"
checks = ["job-straggler"]
severity = "warning"
action = "move"

[breaker]
nodes_percent = 80

[progress]
straggler_percent = 40
pause_s = 2
"""
#: As many as the autopilot needs to know what is usual for a job, and some that it may miss.
READINGS = 50


@pytest.fixture(scope="module")
def pilot() -> Iterator[Pilot]:
    with cluster("slow") as made:
        for node in made.lab.nodes:
            path = made.lab.layout.node(node) / "snapshotd.toml"
            text = path.read_text()
            assert "progress_interval_s = 0\n" in text  # a lab has it switched off
            path.write_text(text.replace("progress_interval_s = 0\n", "progress_interval_s = 0.1\n"))
            made.lab.restart_daemon(node)
        found = Pilot(made, POLICY)
        shutil.rmtree(found.state, ignore_errors=True)  # of a run that was killed
        yield found
        found.reset()


#: Run apart, because a process enters the network of a lab for good.
ASK = """
import asyncio, json, sys
from pathlib import Path
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb

cluster = Cluster.read(Path(sys.argv[1]))
cluster.enter()

async def ask(node):
    async with cluster.client(node) as client:
        reply = await client.node.GetProgress(pb.GetProgressRequest(), timeout_s=30)
    return [len(comm.numbers) for rank in reply.ranks for comm in rank.communicators]

print(json.dumps({node: asyncio.run(ask(node)) for node in sys.argv[2:]}))
"""


def readings(pilot: Pilot) -> dict[str, list[int]]:
    """How many readings each communicator of the ranks on a node has, as the nodes say."""
    command = [sys.executable, "-c", ASK, str(pilot.nodes.lab.cluster_path), "node-1", "node-2"]
    found: dict[str, list[int]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def test_the_slow_rank_is_named_and_moved_and_the_results_are_exact(pilot: Pilot) -> None:
    job = NcclJob(pilot.nodes, PLACES, pace_s=0.05)
    job.await_lines(5)
    pilot.start()
    enough = {"node-1": [True], "node-2": [True, True]}
    until(
        "readings of the three ranks",
        lambda: {node: [count >= READINGS for count in found] for node, found in readings(pilot).items()} == enough,
    )
    assert pilot.rows("SELECT text FROM events WHERE text LIKE '%job-%'") == []  # a uniform job raises nothing
    job.slow_down(SLOW, PLACES[SLOW])
    until(f"the rank to move\n{pilot.nodes.logs()}", lambda: pilot.results() == ["moved"])
    assert [str(rank["node"]) for rank in pilot.nodes.ps(job.ranks[0])] == ["node-1", TARGET, "node-2"]

    ((reason,),) = pilot.rows("SELECT text FROM events WHERE kind = 'intent'")
    assert f"rank {SLOW} of job {job.ranks[0].name} keeps the 2 other ranks waiting" in reason
    assert "were lost so far" in reason
    until("the alarm to end", lambda: not pilot.rows("SELECT * FROM alarms"))
    signals = [
        text.split(":")[:2] for (text,) in pilot.rows("SELECT text FROM events WHERE kind = 'signal' ORDER BY id")
    ]
    assert [(word, about.split()[0]) for word, about in signals] == [
        ("raised", "job-straggler"),
        ("cleared", "job-straggler"),
    ]
    job.ends_well()
    assert pilot.verb("report", "verify")["valid"]
