"""A disk that is slow has the time that it needs to write an image; one that gets nothing done has not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Timeout
from snapshotd.moves import image_seal
from snapshotd.moves.jobs import images
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.sink import TargetSink
from snapshotd.moves.target import sealing
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image import stall, sync
from snapshotd.transport.image.frame import data_frame
from snapshotd.transport.image.store import ImageStore
from tests.moves.test_image_seal import MOVE, Cluster, cluster, files_of
from tests.moves.test_spilled import IMAGE, Place, place

__all__ = ["cluster", "place"]

STEPS = 12
FRAME = data_frame(1, "pages-1.img", 0, b"x" * STEPS * 4096)


class SlowDisk:
    """Writes a step when the test says so; meanwhile the clock, by which it is judged, goes on."""

    def __init__(self, step: Any) -> None:
        self._step, self.now_s, self.stopped = step, 0.0, False
        self.left = STEPS
        self._turns, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def sync_file_range(self, *arguments: int) -> int:
        if not self._turns.acquire(timeout=20):  # of a test that has failed
            self.resume()
        result: int = self._step(*arguments)
        self.left -= 1
        self._done.release()
        return result

    def monotonic(self) -> float:
        return self.now_s

    def later(self, seconds: float) -> None:
        """One more step is written, unless it is stopped."""
        self.now_s += seconds
        if not self.stopped and self.left > 0:
            self._turns.release()
            assert self._done.acquire(timeout=20)

    def resume(self) -> None:
        self._turns.release(10 * STEPS)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(sync._libc.sync_file_range)
    monkeypatch.setattr(sync, "_libc", disk)
    monkeypatch.setattr(sync, "STEP_BYTES", 4096)
    monkeypatch.setattr(stall, "time", disk)
    monkeypatch.setattr(sealing, "ANSWER_S", 0.01)
    monkeypatch.setattr(images, "LOOK_S", 0.01)
    yield disk
    disk.resume()


@pytest.fixture
async def sink(cluster: Cluster, disk: SlowDisk, tmp_path: Path) -> TargetSink:
    """To a target whose image is on that disk; 20 s pass between two requests."""
    cluster.steps.node.store = ImageStore(tmp_path / "on-disk", on_disk=True)  # type: ignore[assignment]
    begin = await cluster.prepared(FRAME)
    disk.left = STEPS + 1  # one for the seal

    async def seal(request: pb.SealRequest, *, timeout_s: float) -> pb.SealReply:
        reply = await cluster.steps.seal(request, "node-9")
        if reply.unfinished:
            await in_thread(disk.later, 20.0)
        return reply

    @contextlib.asynccontextmanager
    async def client(_node: str, _endpoint: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(target=SimpleNamespace(Seal=seal))

    node: Any = SimpleNamespace(credentials=cluster.source, client=client)
    return TargetSink(node, begin)


async def test_slow_disk_has_the_time_that_it_needs(cluster: Cluster, disk: SlowDisk, sink: TargetSink) -> None:
    assert await sink.seal(files_of(FRAME)) == []
    assert disk.now_s >= STEPS * 20.0 > 2 * stall.STALLED_S
    assert cluster.moving.log.last_mark is Mark.SEALED


async def test_disk_that_gets_nothing_done_fails_the_image(cluster: Cluster, disk: SlowDisk, sink: TargetSink) -> None:
    disk.stopped = True
    with pytest.raises(Timeout, match="disk of spare-1 has written nothing") as caught:
        await sink.seal(files_of(FRAME))
    assert caught.value.of_node == "spare-1"
    assert stall.STALLED_S <= disk.now_s < stall.STALLED_S + 30
    assert not cluster.steps.node.store.sealed(MOVE)
    disk.resume()
    disk.stopped = False
    assert await sink.seal(files_of(FRAME)) == []
    assert cluster.moving.log.last_mark is Mark.SEALED
    assert cluster.moving.sealing is None


async def test_source_that_does_not_repeat_its_request_waits(
    cluster: Cluster, disk: SlowDisk, sink: TargetSink
) -> None:
    files = files_of(FRAME)
    signature = image_seal.sign(cluster.source, image_seal.statement(sink.begin, files))
    threading.Timer(0.1, disk.resume).start()
    reply = await cluster.steps.seal(pb.SealRequest(move=MOVE, files=files, signature=signature), "node-9")
    assert reply == pb.SealReply()
    assert cluster.moving.log.last_mark is Mark.SEALED


async def test_own_disk_that_gets_nothing_done_fails_the_snapshot(
    place: Place, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_log = place.begin(IMAGE)
    (place.store.path(IMAGE) / "pages-1.img").write_bytes(b"x" * STEPS * 4096)
    look = stall.Stall.look

    def later(watch: stall.Stall, synced_bytes: int) -> None:
        look(watch, synced_bytes)
        disk.later(20.0)

    monkeypatch.setattr(stall.Stall, "look", later)
    assert [part.name for part in await place.images()._synced(move_log)] == ["sync"]
    assert disk.now_s > 2 * stall.STALLED_S
    disk.stopped = True
    with pytest.raises(Timeout, match="disk of a has written nothing"):
        await place.images()._synced(move_log)
    disk.resume()
    await place.images()._synced(move_log)
