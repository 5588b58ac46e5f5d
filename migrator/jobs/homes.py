"""Checks that the launcher of every suspended rank still waits for it.

The home keeper of a rank is what its launcher knows. If it was killed, or its node was rebooted, the launcher has ended or
has been told that the rank failed: a rank that is resumed then would have no launcher.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError

NAME = "resume-home"


async def kept_on(cluster: Cluster, nodes: Iterable[str]) -> tuple[dict[str, set[str]], dict[str, SnapshotError]]:
    """The ranks whose home keepers live on each of these nodes, and the nodes that did not answer."""

    async def ask(client: DaemonClient) -> set[str]:
        reply = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_TIMEOUT_S)
        return {rank.uid for rank in reply.ranks if rank.place != pb.Rank.SUSPENDED}

    return await ask_all(cluster, ask, [node for node in dict.fromkeys(nodes) if node in cluster.nodes])


def was_rebooted(rank: pb.Rank, infos: Mapping[str, pb.NodeInfo]) -> bool:
    """Whether the home node of a rank answers, and was booted since its launcher started it: the launcher is lost with it."""
    info = infos.get(rank.home_node)
    return info is not None and bool(rank.home_boot_id) and info.boot_id != rank.home_boot_id


def check_after_loss(
    rank: pb.Rank, kept: Mapping[str, set[str]], silent: Mapping[str, SnapshotError], lost: Collection[str]
) -> pb.Check:
    """The same for a rank that is rolled back. Its home node may be the one that was lost: then it goes on without. But if
    that node is well and the keeper has ended, so has the job. `lost`: nodes that the operator declares dead, or that were
    booted since."""
    home = rank.home_node
    found = check(rank, kept, silent)
    if found.verdict != pb.Check.REFUSE:
        return found
    if home in kept and home not in lost:
        found.remedy = f"the job has ended: start it again. If {home} was lost and is back, add --lost {home}"
        return found
    return pb.Check(
        name=NAME,
        verdict=pb.Check.WARN,
        reason=f"its home node {home} is lost, and with it its launcher: the rank goes on without one",
    )


def check(rank: pb.Rank, kept: Mapping[str, set[str]], silent: Mapping[str, SnapshotError]) -> pb.Check:
    """Whether the home keeper of a suspended rank lives. `kept`: the ranks that each home node has keepers of."""
    home = rank.home_node
    if rank.uid in kept.get(home, ()):
        return pb.Check(name=NAME, reason=f"its keeper on {home} waits for it")
    if home in kept:
        return pb.Check(
            name=NAME,
            verdict=pb.Check.REFUSE,
            reason=f"its keeper on {home} has ended (it was killed, or the node was rebooted), and with it the launcher",
            remedy="start the job again from its own checkpoint; `migrator job drop` removes the images",
        )
    why = silent[home].headline if home in silent else "it is not a node of this cluster"
    return pb.Check(
        name=NAME,
        verdict=pb.Check.REFUSE,
        reason=f"its home node {home} does not say whether the launcher still waits for it: {why}",
        remedy=f"start snapshotd on {home}, then retry",
    )
