"""A move of closed files from one node, with the daemon's code on both sides and a folder in place of the image channel."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.files.as_user import User
from snapshotd.moves import closed_files
from snapshotd.moves.carry import Carry
from snapshotd.moves.closed_files import Ahead
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files as sending
from snapshotd.moves.source import sink

#: Of this test process alone: tests that run at the same time have processes of other users.
USER = User(300_000 + os.getpid(), 300_000 + os.getpid())
MOVE, EARLIER = "m-0123456789ab", "m-ba9876543210"


class FolderSender:
    """Stands in for the image channel and its target: what is sent is a file in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, dict[str, int]()
        self.fails: Exception | None = None

    async def __aenter__(self) -> FolderSender:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def put_fd(self, name: str, fd: int) -> None:
        content = b""
        while self.fails is None:
            try:
                if not (block := os.read(fd, 1 << 20)):
                    break
                content += block
            except BlockingIOError:
                await asyncio.sleep(0.001)
        if self.fails is not None:
            raise self.fails
        self._store(name, content)

    async def put_open_file(self, name: str, fd: int) -> None:
        self._store(name, os.pread(fd, os.fstat(fd).st_size, 0))

    async def finish(self) -> list[pb.ImageFile]:
        return [pb.ImageFile(name=name, size=size) for name, size in self.sent.items()]

    def _store(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)
        self.sent[name] = len(content)


class Move:
    """A rank on one node, and the target of its move."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local, self.there, self.images, state = (top / name for name in ("local", "there", "images", "state"))
        for path in (self.local, self.there, self.images, state):
            path.mkdir()
            path.chmod(0o700 if path in (self.images, state) else 0o1777)
        config = SimpleNamespace(
            carry_closed_bytes=1 << 20,
            chunk_bytes=1 << 20,
            **dict.fromkeys(("state_dir", "run_dir", "image_dir", "spool_dir"), state),
            snapshot_spill_dir="",
        )
        self.journal = Journal(state)
        self.node: Any = SimpleNamespace(config=config, carry=Carry(state, [str(self.local)]), journal=self.journal)
        group = SimpleNamespace(pids=list)
        self.entry: Any = SimpleNamespace(
            pid=1, uid="job-0", user_id=USER.user_id, started_unix_s=time.time() - 1, group=group
        )
        self.log = self.begin(MOVE, "source")
        self.log.mark(Mark.STREAMED, rank_user=USER)
        self.sender: Any = FolderSender(self.images)
        monkeypatch.setattr(sending, "user_of_rank", lambda pid, user_id: USER)
        monkeypatch.setattr(sending, "FRESH_S", -60.0)
        monkeypatch.setattr(sending, "Sender", lambda streams, chunk_bytes: self.sender)
        monkeypatch.setattr(sink, "streams_to_target", self._streams)
        self.cache = self.local / "cache"
        self.cache.mkdir()
        os.chown(self.cache, USER.user_id, USER.group_id)

    @asynccontextmanager
    async def _streams(self, _node: object, _begin: object, *, go_last: bool) -> AsyncIterator[list[Any]]:
        yield []

    def begin(self, move: str, role: str) -> MoveLog:
        nodes = ("node-1", "a:1", "spare-1", "b:1") if role == "source" else ("node-3", "c:1", "node-1", "a:1")
        return self.journal.begin(Begin(move, role, "job-0", "job", 0, *nodes, "ab" * 32, "boot", 1.0, 30.0))

    def write(self, name: str, content: str) -> None:
        (self.cache / name).write_text(content)
        os.chown(self.cache / name, USER.user_id, USER.group_id)

    async def ahead(self) -> Ahead:
        self.sender.sent.clear()
        moving: Any = SimpleNamespace(facts=pb.RankFacts(), log=self.log, scope=None)
        return await sending.send_ahead(self.node, moving, self.entry)

    async def rest(self, ahead: Ahead | None) -> list[pb.ImageFile]:
        self.sender.sent.clear()
        return await sending.send_rest(self.node, self.log, self.entry, self.sender, ahead, [], USER)

    def arrived(self) -> dict[str, str]:
        target = closed_files.ClosedFiles(self.images, {str(self.local): str(self.there)})
        target.place(self.images, USER, lambda placed: None)
        return {str(path.relative_to(self.there)): path.read_text() for path in self.there.rglob("*") if path.is_file()}


@contextmanager
def made_in(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    if os.geteuid() != 0:
        pytest.skip("files of several users are made by root")
    top = Path(tempfile.mkdtemp(prefix="closed-", dir=place))
    top.chmod(0o755)
    try:
        yield Move(top, monkeypatch)
    finally:
        shutil.rmtree(top)
