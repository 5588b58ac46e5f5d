"""Examines a repaired node before ranks are moved to it again: `migrator return`.

The built-in part asks the node's daemon for its own diagnosis and has it connect to the other nodes. The policy can name a
program for the rest, such as a burn-in of the GPUs and a small collective: its last argument is the node's name.
"""

from __future__ import annotations

import asyncio

from migrator.autopilot.policy import Validation
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError

DIAGNOSE_S = 60.0
#: The node connects to that many others: enough to notice a broken network, few enough for a large cluster.
PEERS = 8


async def problems(cluster: Cluster, node: str, rules: Validation) -> list[str]:
    """What is wrong with the node. Its latched alarms are cleared first: `return` says that they were dealt with."""
    others = [name for name in cluster.nodes if name != node][:PEERS]
    peers = [pb.PeerNode(name=name, endpoint=cluster.nodes[name]) for name in others]
    try:
        async with cluster.client(node) as client:
            await client.node.ClearAlarms(pb.ClearAlarmsRequest(all=True), timeout_s=DIAGNOSE_S)
            request = pb.DiagnoseRequest(peers=peers, limit_s=DIAGNOSE_S / 2)
            found = await client.node.Diagnose(request, timeout_s=DIAGNOSE_S)
            wrong = [f"{one.check}: {one.text}" for one in found.findings if one.state == "failed"]
            wrong += [
                f"{route.peer}: {route.control or route.data}" for route in found.routes if route.control or route.data
            ]
            if not wrong and rules.command:
                wrong += await _run([*rules.command, node], rules.timeout_s)
            health = await client.node.GetHealth(pb.GetHealthRequest(), timeout_s=DIAGNOSE_S)
    except SnapshotError as error:
        return [error.message]
    return wrong + [f"{alarm.check} on {alarm.subject}: {alarm.text}" for alarm in health.alarms]


async def _run(command: list[str], timeout_s: float) -> list[str]:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return [f"{command[0]}: {error.strerror}"]
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return [f"{command[0]} did not end within {timeout_s:.0f} s"]
    finally:  # also if this task was cancelled: its result would not be read
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return []
    return [f"{command[0]} ended with {process.returncode}: {output.decode(errors='replace').strip()[-500:]}"]
