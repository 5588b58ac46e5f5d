"""Sends an image with the certificate of a node: `python -m integration.security.forger send|facts SETTINGS`.

SETTINGS is a JSON file. `facts` prints what preflight shows of a rank. With `send`, an operator who believes that the node
has the rank prepares the move and asks for the restore, as `migrator move` would; the answer of the target is printed.
Run it where the nodes are reachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.client import DaemonClient
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import SnapshotError, WrongState
from snapshotd.moves import image_seal, rules
from snapshotd.moves.record import Begin
from snapshotd.transport.image.grpc_channel import PushCall
from snapshotd.transport.image.sender import Sender

CHUNK_BYTES = 1 << 20


async def forge(settings: dict[str, Any]) -> dict[str, Any]:
    """The target asks the real source some seconds after `Prepare`, and ends a move that it never began: on a busy machine
    that may be before the image is sealed, so there are several tries."""
    for _ in range(9):
        with contextlib.suppress(WrongState):
            return await _forge(settings)
    return await _forge(settings)


async def _forge(settings: dict[str, Any]) -> dict[str, Any]:
    target, endpoint = settings["target"], settings["target_endpoint"]
    operator, node = (credentials(Path(settings[name])) for name in ("operator", "node"))
    move = f"m-{secrets.token_hex(6)}"
    facts = ParseDict(settings["facts"], pb.RankFacts())
    async with (
        DaemonClient(endpoint, credentials=operator, node=target) as asked,
        DaemonClient(endpoint, credentials=node, node=target) as sent,
    ):
        prepared = await asked.target.Prepare(
            pb.PrepareRequest(move=move, facts=facts, source_endpoint=settings["source_endpoint"]), timeout_s=30
        )
        channels = [GrpcChannel(open_channel(endpoint, node, target))]
        async with Sender([PushCall(channel, move) for channel in channels], CHUNK_BYTES) as sender:
            for path in sorted(Path(settings["folder"]).iterdir(), key=lambda path: path.name == "meta.json"):
                await sender.put_file(path.name, path)
            files = await sender.finish()
        for channel in channels:
            await channel.close()
        begin = Begin(
            move=move,
            role="source",
            rank_uid=facts.rank.uid,
            job=facts.rank.job,
            rank=facts.rank.rank,
            source_node=facts.source_node,
            source_endpoint=settings["source_endpoint"],
            target_node=target,
            target_endpoint=endpoint,
            nonce=prepared.nonce.hex(),
            boot_id="",
            begun_unix_s=0.0,
        )
        signature = image_seal.sign(node, image_seal.statement(begin, files))
        sealed = await sent.target.Seal(pb.SealRequest(move=move, files=files, signature=signature), timeout_s=60)
        assert not sealed.damaged, sealed.damaged
        try:
            await asked.target.Restore(pb.MoveRequest(move=move), timeout_s=60)
            answer = {"code": "", "message": "restored"}
        except SnapshotError as error:
            answer = {"code": error.code, "message": error.message}
        token = rules.proof(prepared.nonce, "ABORT", move)  # a source knows the nonce
        await asked.target.Discard(pb.TokenRequest(move=move, token=token), timeout_s=60)
        return answer


def credentials(folder: Path) -> Credentials:
    return Credentials(ca=folder / "ca.crt", cert=folder / "tls.crt", key=folder / "tls.key")


async def shown_facts(settings: dict[str, Any]) -> dict[str, Any]:
    """What the source tells an operator about a rank."""
    who, source = credentials(Path(settings["operator"])), settings["source"]
    async with DaemonClient(settings["source_endpoint"], credentials=who, node=source) as client:
        ranks = (await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=30)).ranks
        uid = next(rank.uid for rank in ranks if rank.job == settings["job"])
        request = pb.InspectRequest(rank_uid=uid, target_node=settings["target"], protocol=protocol.own())
        return MessageToDict((await client.source.Inspect(request, timeout_s=60)).facts)


if __name__ == "__main__":
    verb = {"send": forge, "facts": shown_facts}[sys.argv[1]]
    print(json.dumps(asyncio.run(verb(json.loads(Path(sys.argv[2]).read_text())))))
