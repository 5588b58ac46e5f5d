"""The daemon of one node as far as forwarding goes: the Peer service behind its own certificate, a journal and a registry.

`forwarding_node.py serve NAME IP STATE_DIR CA_DIR` serves until its standard input ends.
`forwarding_node.py forward NAME SERVER_NAME SERVER_IP CA_DIR` sends the ForwardRequest from its standard input, in protobuf's
JSON form, with the certificate of node NAME, and prints "done" or the error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.json_format import Parse

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import SnapshotError
from snapshotd.api.servicers import PeerServicer
from snapshotd.keepers.ranks import Ranks
from snapshotd.moves.journal import Journal
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.network.dispatch import Services
from tests.served import Linked

PORT = 7070


def credentials(folder: str, name: str) -> Credentials:
    nodes = Path(folder) / "nodes"
    return Credentials(Path(folder) / "ca.crt", nodes / f"{name}.crt", nodes / f"{name}.key")


async def serve(name: str, ip: str, state: str, folder: str) -> None:
    services = Services()
    ends = Linked(services, credentials(folder, name))
    node = SimpleNamespace(
        config=SimpleNamespace(node=name, state_dir=Path(state)),
        journal=Journal(Path(state)),
        ranks=Ranks(Path(state)),
        client=lambda other, endpoint: DaemonClient(endpoint, node=other, channel=ends.connect(other, endpoint)),
    )

    async def forwarded(uid: str) -> None:
        print("forwarded", uid, flush=True)

    forwarding = Forwarding(cast(Any, node), forwarded)
    services.add("Peer", PeerServicer(cast(Any, None), forwarding))
    async with ends.listening(f"{ip}:{PORT}"):
        await forwarding.recall()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        forwarding.stop()


async def forward(name: str, server: str, ip: str, folder: str) -> None:
    request = Parse(sys.stdin.read(), pb.ForwardRequest())
    async with DaemonClient(f"{ip}:{PORT}", credentials=credentials(folder, name), node=server) as client:
        try:
            await client.peer.Forward(request, timeout_s=30)
            print("done")
        except SnapshotError as error:
            print(f"{error.code}: {error.message}")


if __name__ == "__main__":
    asyncio.run({"serve": serve, "forward": forward}[sys.argv[1]](*sys.argv[2:]))
