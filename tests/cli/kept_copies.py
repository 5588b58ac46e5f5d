"""Three nodes that keep the images of a snapshot, and the calls with which `bring_back` asks them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from migrator.job_results import JobOptions, JobResult, UnreadableImage
from migrator.jobs.resume import bring_back
from migrator.results import Event
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError, Unreachable, Unreadable

PARTS = [
    pb.Participant(
        rank_uid=f"night-{rank}",
        rank=rank,
        move=f"own-{rank}",
        node=f"node-{rank + 1}",
        copy=f"copy-{rank}",
        copy_node=f"node-{2 - rank}",
        more_copies=[pb.ImageCopy(move=f"more-{rank}", node="node-3")],
    )
    for rank in (0, 1)
]
RECORD = pb.JobRecord(record="m-00000000000b", job="night", user_id=7, kind="rollback", participants=PARTS)


class Cluster:
    """Three nodes. Images fail at the call that the test names."""

    def __init__(self, **bad: str) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in (1, 2, 3)}
        self.labels: dict[str, dict[str, str]] = {}
        self.bad = {image.replace("_", "-"): call for image, call in bad.items()}
        self.lost: set[str] = set()  # images that their nodes do not have any more
        self.errors: dict[tuple[str, str], SnapshotError] = {}  # by call and image: other failures
        self.silent: set[str] = set()  # nodes that do not answer
        self.notes: list[str] = []
        self.asked: list[tuple[str, str]] = []  # call, image
        self.image_of: dict[str, str] = {}  # by move
        self.records: list[str] = []
        self.running: set[str] = set()  # moves
        self.made_on: dict[str, str] = {}  # by image: what its node says; else the node of the rank
        self.prepared: list[pb.PrepareRequest] = []

    def _fail(self, call: str, image: str) -> None:
        self.asked.append((call, image))
        if image in self.lost:
            raise NotFound(f"no image {image}")
        if self.bad.get(image) == call:
            raise Unreadable(f"the image {image} of rank {image[-1]}: Input/output error")
        if (call, image) in self.errors:
            raise self.errors[call, image]

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        async def image(request: pb.MoveRequest, timeout_s: float) -> pb.StoredImage:
            self._fail("read", request.move)
            rank = int(request.move[-1])
            facts = pb.RankFacts(source_node=self.made_on.get(request.move, f"node-{rank + 1}"))
            facts.rank.CopyFrom(pb.Rank(uid=f"night-{rank}", job="night", rank=rank, user_id=7))
            return pb.StoredImage(facts=facts)

        async def examine(request: pb.ExamineRequest, timeout_s: float) -> pb.ExamineReply:
            return pb.ExamineReply()

        async def begin(request: pb.BeginJobRequest, timeout_s: float) -> pb.BeginJobReply:
            self.records.append(request.record)
            for part in request.participants:
                self.image_of[part.move] = part.image
            return pb.BeginJobReply()

        async def prepare(request: pb.PrepareRequest, timeout_s: float) -> pb.PrepareReply:
            self.prepared.append(request)
            self._fail("prepare", self.image_of[request.move])
            return pb.PrepareReply(nonce=b"nonce")

        async def send(request: pb.SendRequest, timeout_s: float) -> AsyncIterator[pb.Progress]:
            self._fail("send", request.image)
            yield pb.Progress(bytes_sent=3, bytes_expected=3, done=True)

        async def restore(request: pb.MoveRequest, timeout_s: float) -> pb.RestoreReply:
            self._fail("restore", self.image_of[request.move])
            return pb.RestoreReply()

        async def commit(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            return pb.Outcome(kind=pb.COMMIT)

        async def abort(request: pb.AbortRequest, timeout_s: float, retry: bool) -> pb.Outcome:
            return pb.Outcome(kind=pb.ABORT)

        async def activate(request: pb.TokenRequest, timeout_s: float, retry: bool) -> pb.ActivateReply:
            self.running.add(request.move)
            return pb.ActivateReply(running=True)

        async def discard(request: pb.TokenRequest, timeout_s: float) -> pb.DiscardReply:
            return pb.DiscardReply()

        async def copy(request: pb.MoveRequest, timeout_s: float) -> pb.Copy:
            return pb.Copy(state=pb.Copy.DISCARDED)

        async def info(request: pb.GetNodeRequest, timeout_s: float) -> pb.NodeInfo:
            if node in self.silent:
                raise Unreachable(f"{node} does not answer")
            return pb.NodeInfo(name=node)

        yield SimpleNamespace(
            node=SimpleNamespace(GetNode=info),
            source=SimpleNamespace(GetImage=image, Send=send),
            target=SimpleNamespace(
                Examine=examine, Prepare=prepare, Restore=restore, Activate=activate, Discard=discard, GetCopy=copy
            ),
            job=SimpleNamespace(Begin=begin, Commit=commit, Abort=abort),
        )

    async def back(
        self,
        known: tuple[UnreadableImage, ...] = (),
        record: pb.JobRecord = RECORD,
        on: Mapping[int, str] = MappingProxyType({}),
    ) -> JobResult:
        cluster: Any = self

        def hear(event: Event) -> None:
            self.notes += [event.text] if event.kind == "note" else []

        return await bring_back(cluster, JobOptions("night", on=on), "node-1", record, hear, known)

    @property
    def used(self) -> list[str]:
        return sorted(self.image_of[move] for move in self.running)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of all nodes is asked of these."""

    async def infos(cluster: Any) -> dict[str, pb.NodeInfo]:
        return {node: pb.NodeInfo(name=node) for node in cluster.nodes}

    async def addresses(cluster: Any, infos: Any) -> list[pb.NodeAddresses]:
        return []

    async def kept_on(cluster: Any, nodes: Any) -> tuple[dict[str, set[str]], dict[str, SnapshotError]]:
        return {}, {}

    module = sys.modules["migrator.jobs.resume"]
    monkeypatch.setattr(module, "node_infos", infos)
    monkeypatch.setattr(module, "node_addresses", addresses)
    monkeypatch.setattr(module.homes, "kept_on", kept_on)
