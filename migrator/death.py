"""Examines an operator's claim that a node is dead, by every route, and has the node fenced if the cluster says how.

Invariant: nothing found here proves that a node is dead; only fencing makes it true. A daemon that answers any node of the
cluster is not dead, so the claim is refused. Weaker signs of life are reported, and the operator decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from migrator.cluster import Cluster
from migrator.fan_out import ask_all
from snapshotd.api import signs_of_life
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError, Timeout, Where, WrongState

#: Longer than a daemon looks for another one.
ASK_S = 15.0
#: How long a fencing program may take: a power switch needs many seconds.
FENCE_S = 300.0

Note = Callable[[str], None]


async def establish(cluster: Cluster, node: str, note: Note, confirm: Callable[[], None]) -> list[str]:
    """Reports what every route to the node shows, has the operator confirm, and fences the node if the cluster says how.

    Returns what was done. Raises WrongState if the daemon of the node answers another node, also after fencing."""
    await _examine(cluster, node, note, refuse=not cluster.fence)
    confirm()
    if not cluster.fence:
        return []
    done = await _fence(cluster, node, note)
    await _examine(cluster, node, note, refuse=True)
    return done


async def _examine(cluster: Cluster, node: str, note: Note, *, refuse: bool) -> None:
    endpoint = cluster.nodes.get(node, "")
    if not endpoint:
        return
    found = []
    if not endpoint.startswith("unix:"):
        found.append(f"from here: {(await asyncio.to_thread(signs_of_life.look, endpoint)).words}")

    answers = await ask_others(cluster, node, [other for other in cluster.nodes if other != node])
    found += [f"from {other}: {answer.found}" for other, answer in answers.items()]
    for text in found:
        note(f"{node}, {text}")
    seen = [other for other, answer in answers.items() if answer.daemon_answers]
    if seen and refuse:
        raise WrongState(
            f"snapshotd on {node} answers {', '.join(seen)}: it is not dead, but cut off from here",
            remedy="repair the network, or power the node off; then retry",
            where=Where.UNKNOWN,
        )


async def ask_others(cluster: Cluster, node: str, others: Sequence[str]) -> dict[str, pb.FindNodeReply]:
    """What those of the other nodes that answer see of the node."""
    request = pb.FindNodeRequest(name=node, endpoint=cluster.nodes[node])

    async def ask(client: DaemonClient) -> pb.FindNodeReply:
        try:
            return await client.node.FindNode(request, timeout_s=ASK_S)
        except UnknownMethod:
            return pb.FindNodeReply(found="its daemon is too old to look")

    answers, _ = await ask_all(cluster, ask, others)
    return answers


async def _fence(cluster: Cluster, node: str, note: Note) -> list[str]:
    """Runs the cluster's fencing program for the node. Raises SnapshotError unless it succeeds."""
    command = [*cluster.fence, node]
    note(f"fencing {node}: {' '.join(command)}")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise _not_fenced(node, f"{command[0]}: {error.strerror}") from error
    try:
        async with asyncio.timeout(FENCE_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise Timeout(f"fencing {node} took longer than {FENCE_S:.0f} s; nothing was declared") from error
    if process.returncode != 0:
        raise _not_fenced(node, f"exit status {process.returncode}: {output.decode(errors='replace').strip()[-500:]}")
    return [f"{node} was fenced by {command[0]}"]


def _not_fenced(node: str, why: str) -> SnapshotError:
    return WrongState(
        f"{node} could not be fenced: {why}",
        remedy="power the node off by hand, or correct `fence` in cluster.toml; nothing was declared",
        where=Where.UNKNOWN,
    )
