"""`migrator cluster rotate --ca`: the stages of migrator/ca_rotation.py, each after a look at what the nodes have."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from migrator import ca_rotation, membership
from migrator.ca_rotation import Stage
from migrator.cli import output
from migrator.cluster import Cluster, Tls
from migrator.membership import Site
from snapshotd.api.errors import Refused
from snapshotd.api.node_file import NodeFile

if TYPE_CHECKING:
    from snapshotd.api.client import DaemonClient

Sent = list[dict[str, Any]]
#: How long a daemon may take to use the files of a node that has joined; it looks every second. The second limit is for
#: nodes that were told to join by hand: probably some have not.
READY_S, ASKED_S = 60.0, 5.0

_REACHED = {
    Stage.INTRODUCED: "a new CA is introduced: with these files the nodes trust both",
    Stage.SWITCHED: "the new CA signs: with these files the nodes have certificates of it",
    Stage.STABLE: "the old CA is dropped: with these files the nodes trust the new CA only",
}


@dataclasses.dataclass(frozen=True)
class Done:
    stage: Stage
    sent: Sent
    others: list[str]  # operators who need new files


def rotate(
    site: Site,
    cluster: Cluster,
    nodes: list[str],
    give: Callable[[list[NodeFile]], Sent],
    *,
    check: bool,
    all_stages: bool,
) -> Done:
    """One stage, or all that are left. Raises Refused if a node is not ready for it; then the stage is as before."""
    while True:
        if check and ca_rotation.stage(site.ca) is not Stage.STABLE:
            _check_ready(site, cluster, nodes, READY_S if all_stages else ASKED_S)
        reached = membership.advance_ca(site)
        sent = give([membership.renew_node(site, name) for name in nodes])
        if not all_stages or reached is Stage.STABLE:
            return Done(reached, sent, membership.other_operators(site))


def report(done: Done, *, as_json: bool, show: Callable[..., None]) -> int:
    if as_json:
        output.json_object({"stage": done.stage.value, "nodes": done.sent, "other_operators": done.others})
        return 0
    print(_REACHED[done.stage])
    show(done.sent, start=False)
    if done.others:
        files = "ca.crt and new certificates (`migrator pki renew --within 3650`)"
        print(f"these operators need {files} from the folder of the CA: {', '.join(done.others)}")
    if done.stage is not Stage.STABLE:
        print("next, when all nodes have joined: migrator cluster rotate --ca")
    return 0


def _check_ready(site: Site, cluster: Cluster, nodes: list[str], limit_s: float) -> None:
    introduced = ca_rotation.stage(site.ca) is Stage.INTRODUCED
    with tempfile.TemporaryDirectory(prefix="probe-", dir=site.ca) as place:
        made = ca_rotation.probe(site.ca, Path(place) / "ca", membership.operator_of(cluster))
        probing = dataclasses.replace(cluster, tls=Tls(made.ca, made.cert, made.key))
        late = asyncio.run(_late(probing, limit_s))
    if late:
        reason = "do not trust the new CA yet" if introduced else "have no certificate of the new CA yet"
        shown = "\n".join(f"  - {name}: {text}" for name, text in late.items())
        raise Refused(
            f"{len(late)} of {len(nodes)} nodes do not answer, or {reason}; the CA is as before:\n{shown}",
            remedy="have them join with their newest files (`migrator cluster rotate` makes these again), then run"
            " `migrator cluster rotate --ca` again; --no-check goes on without them, and cuts them off",
        )


async def _late(cluster: Cluster, limit_s: float) -> dict[str, str]:
    """The nodes that this operator does not reach, with the reason."""
    from migrator.fan_out import ASK_TIMEOUT_S, ask_all
    from snapshotd.api import snapshotd_pb2 as pb

    async def ask(client: DaemonClient) -> pb.NodeInfo:
        return await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)

    deadline_s = time.monotonic() + limit_s
    while True:
        _, silent = await ask_all(cluster, ask)
        if not silent or time.monotonic() > deadline_s:
            return {name: error.headline for name, error in silent.items()}
        await asyncio.sleep(1)
