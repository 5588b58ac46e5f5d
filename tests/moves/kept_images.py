"""A node that keeps images of snapshots, its own ranks' and copies, and sends them to others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves import description
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source import sink
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.spill import SpillingStore
from snapshotd.transport.image.store import ImageStore
from tests.moves.test_home_keepers import META
from tests.served import credentials

RANK = pb.Rank(uid="train-0-01234567", job="train", rank=0, user_id=7)
RECORD = "m-0000000000ff"
FILES = {"core-1.img": b"core", "pages-1.img": b"pages" * 2000, description.FILE: json.dumps(META).encode()}


class Keeping:
    """A node."""

    def __init__(self, folder: Path, name: str, ca: Path) -> None:
        self.folder, self.name = folder / name, name
        self.store, self.journal = SpillingStore(self.folder / "images"), Journal(self.folder / "state")
        self.received = ImageStore(self.folder / "received")
        self.sealed: list[pb.SealRequest] = []
        config = SimpleNamespace(node=name, advertise=f"{name}:1", streams=2, chunk_bytes=1 << 20, copy_limit="")
        node = SimpleNamespace(
            config=config,
            credentials=credentials(pki.issue_node(ca, name)),
            journal=self.journal,
            store=self.store,
            suspended=ImageStore(self.folder / "suspended"),
            store_of=lambda begin: self.store,
            client=self._client,
            saving={},
        )
        self.node: Any = node
        self.images = StoredImages(self.node, None)  # type: ignore[arg-type]

    def keep(self, move: str, kind: str = "snapshot", *, committed: bool = True) -> MoveLog:
        """An image, or a copy of one of node-1."""
        role = "source" if kind == "snapshot" else "target"
        where = (RANK.uid, RANK.job, RANK.rank, "node-1", "node-1:1", self.name, f"{self.name}:1")
        begin = Begin(move, role, *where, "00" * 32, "boot", 1.0, 30.0, 7, RECORD, "node-1", "node-1:1", kind)
        move_log = self.journal.begin(begin)
        self.store.create(move, 1 << 20)
        for name, content in FILES.items():
            (self.store.path(move) / name).write_bytes(content)
        assert self.store.seal(move, []) == []
        stored.write_facts(move_log, pb.RankFacts(rank=RANK, source_node="node-1"))
        move_log.mark(Mark.STREAMED if kind == "snapshot" else Mark.SEALED, continued=True)
        if committed:
            move_log.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
            move_log.mark(Mark.SETTLED)
        return move_log

    def file(self, move: str, name: str) -> Path:
        return self.store.path(move) / name

    async def send(self, image: str, move: str, to: str = "node-3") -> list[pb.Progress]:
        """To a target whose store is `received`."""
        self.received.create(move, 1 << 20)
        request = pb.SendRequest(image=image, move=move, target_node=to, target_endpoint="e", nonce=b"n" * 32)
        return [progress async for progress in self.images.send(request)]

    @contextlib.asynccontextmanager
    async def _client(self, _name: str, _endpoint: str) -> AsyncIterator[Any]:
        async def seal(request: pb.SealRequest, timeout_s: float) -> pb.SealReply:
            self.sealed.append(request)
            return pb.SealReply(damaged=self.received.seal(request.move, request.files))

        yield SimpleNamespace(target=SimpleNamespace(Seal=seal))


@contextlib.asynccontextmanager
async def _streams(node: Any, begin: Begin, *, go_last: bool = False) -> AsyncIterator[Sequence[LocalStream]]:
    yield [LocalStream(node.images_received, begin.move) for _ in range(node.config.streams)]


def keeping(folder: Path, name: str, ca: Path, monkeypatch: pytest.MonkeyPatch) -> Keeping:
    monkeypatch.setattr(sink, "streams_to_target", _streams)
    made = Keeping(folder, name, ca)
    made.node.images_received = made.received
    return made
