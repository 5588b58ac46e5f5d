"""A disk that does not answer holds up the images that lie on it, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import BadConfig
from snapshotd.runtime.blocking import in_thread
from snapshotd.selfcheck import every
from snapshotd.transport.image.frame import data_frame
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.spill import SpillDisk, SpillingStore
from tests.shim.jobs import until
from tests.transport.image.frozen_disk import FrozenDisk, made
from tests.transport.image.test_store import MOVE, OTHER, listed

pytestmark = pytest.mark.root

LARGE = 64 << 20
#: More than the event loop has threads.
CHUNKS = 40
PATIENCE_S = 30.0


def frames(length: int) -> list[Any]:
    return [data_frame(number, f"f{number}.img", 0, b"x" * length) for number in range(1, CHUNKS + 1)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenDisk]:
    with made(tmp_path) as disk:
        yield disk


@pytest.fixture
async def store(tmp_path: Path, disk: FrozenDisk, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SpillingStore]:
    """One image is on the disk, and there is room in memory for another one."""
    spill = SpillDisk(disk.folder)
    store = SpillingStore(tmp_path / "images", spill)
    monkeypatch.setattr(store, "_free_bytes", lambda: 1 << 20)
    store.create_kept(MOVE, LARGE)
    assert store.on_disk(MOVE)
    yield store
    spill.close()


async def put(store: SpillingStore, move: str, chunks: list[Any]) -> None:
    streams = [LocalStream(store, move) for _ in chunks]
    assert all(await asyncio.gather(*(one.send(chunk) for one, chunk in zip(streams, chunks, strict=True))))


async def memory_works(store: SpillingStore) -> None:
    """Another rank's image can be made, written, sealed and removed."""
    async with asyncio.timeout(PATIENCE_S):
        await in_thread(store.create_kept, OTHER, 1 << 19)
        await put(store, OTHER, frames(100))
        assert await in_thread(store.seal, OTHER, listed(*frames(100))) == []
        assert OTHER in store.moves()
        await in_thread(store.drop, OTHER)


async def test_image_that_is_written_to_it_holds_up_no_other(store: SpillingStore, disk: FrozenDisk) -> None:
    with disk.frozen():
        writing = asyncio.create_task(put(store, MOVE, frames(5000)))
        await memory_works(store)
        assert not writing.done()
    await writing
    assert await in_thread(store.seal, MOVE, listed(*frames(5000))) == []


async def test_image_that_is_begun_on_it_holds_up_no_other(store: SpillingStore, disk: FrozenDisk) -> None:
    third = "m-000000000003"
    with disk.frozen():
        beginning = threading.Thread(target=store.create_kept, args=(third, LARGE))
        beginning.start()
        await memory_works(store)
        assert store.moves() == {MOVE}, "it has not got its folder yet"
        store.drop(MOVE)
        assert store.moves() == set()
        assert beginning.is_alive()
    await in_thread(beginning.join)
    assert store.on_disk(third)


async def test_self_check_says_that_it_does_not_answer(disk: FrozenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(snapshot_spill_dir=str(disk.folder))
    monkeypatch.setattr(every, "DISK_S", 0.5)
    with disk.frozen():
        for _ in range(2):
            found = await every._spilling(config)
            assert "does not answer" in found.text
    monkeypatch.setattr(every, "DISK_S", PATIENCE_S)
    await in_thread(until, lambda: not every._disk._busy)
    assert "does not answer" not in (await every._spilling(config)).text


def test_daemon_starts_without_it(disk: FrozenDisk) -> None:
    with disk.frozen():
        with pytest.raises(BadConfig, match="does not answer"):
            SpillDisk.within(disk.folder, 0.5)
        (late,) = [thread for thread in threading.enumerate() if thread.name == f"open {disk.folder}"]
    late.join()
    SpillDisk.within(disk.folder, PATIENCE_S).close()
