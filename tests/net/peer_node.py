"""The daemon of one node as far as a peer's steps go, behind its own certificate.

`peer_node.py serve NAME IP STATE_DIR CA_DIR USERS` serves until its standard input ends. As a source it knows every move and
has not decided any. USERS, separated by commas, are its `connection_users`.
`peer_node.py ask SERVER_NAME SERVER_IP CA_DIR` calls methods of Peer with an operator's certificate: for each line of its
standard input, which is METHOD and the request in protobuf's JSON form, it prints the reply as JSON, or the error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.json_format import MessageToJson, Parse

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import Credentials, DaemonClient
from snapshotd.api.errors import SnapshotError
from snapshotd.api.servicers import PeerServicer
from snapshotd.diagnosis.run import Diagnosis
from snapshotd.keepers.ranks import Ranks
from snapshotd.moves.journal import Journal
from snapshotd.moves.peers.steps import PeerSteps
from snapshotd.moves.reserve import Reserve
from snapshotd.network.dispatch import Services
from tests.net.forwarding_node import PORT, credentials
from tests.served import Linked, servicer


async def undecided(request: pb.MoveRequest, context: object) -> pb.Outcome:
    return pb.Outcome(kind=pb.UNDECIDED)


class Probing:
    def __init__(self, node: Any) -> None:
        node.config.advertise = node.config.listen = "127.0.0.1:1"
        self.diagnosis = Diagnosis(node)

    async def open(self, request: pb.OpenProbeRequest, context: object) -> pb.OpenProbeReply:
        return await self.diagnosis.open_probe(request)


async def serve(name: str, ip: str, state: str, folder: str, users: str) -> None:
    services = Services()
    mine = credentials(folder, name)
    ends = Linked(services, mine)
    place = Path(state)
    config = SimpleNamespace(
        node=name,
        state_dir=place,
        image_dir=place / "images",
        credentials=mine,
        connection_users=tuple(filter(None, users.split(","))),
        allow_root_ranks=False,
        data_addresses=(),
    )
    node = SimpleNamespace(
        config=config,
        reserve=Reserve(place, 4096),
        journal=Journal(place),
        ranks=Ranks(place),
        client=lambda other, endpoint: DaemonClient(endpoint, node=other, channel=ends.connect(other, endpoint)),
    )
    services.add("Peer", PeerServicer(PeerSteps(cast(Any, node)), cast(Any, None)))
    servicer("Source", GetOutcome=undecided)(services)
    servicer("Node", OpenProbe=Probing(cast(Any, node)).open)(services)
    async with ends.listening(f"{ip}:{PORT}"):
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def ask(server: str, ip: str, folder: str) -> None:
    ca = Path(folder)
    operator = Credentials(ca / "ca.crt", ca / "operators/alice.crt", ca / "operators/alice.key")
    async with DaemonClient(f"{ip}:{PORT}", credentials=operator, node=server) as client:
        for line in sys.stdin:
            method, _, request = line.partition(" ")
            call: Any = getattr(client.peer, method)
            try:
                reply = await call(Parse(request, call.request()), timeout_s=60, retry=True)
                print(MessageToJson(reply, indent=None), flush=True)
            except SnapshotError as error:
                print(f"{error.code}: {error.headline}", flush=True)


if __name__ == "__main__":
    program: Any = {"serve": serve, "ask": ask}[sys.argv[1]]
    asyncio.run(program(*sys.argv[2:]))
