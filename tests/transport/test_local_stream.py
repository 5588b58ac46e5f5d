"""Images that are kept on this node: written through the same sender and store, verified, and found again after a restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapshotd.api.errors import Full, SnapshotError
from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.transport.image.frame import Frame
from snapshotd.transport.image.local_stream import LocalStream
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.store import ImageStore

MOVE = "m-0123456789ab"


async def put(store: ImageStore, files: dict[str, Path]) -> list[ImageFile]:
    async with Sender([LocalStream(store, MOVE) for _ in range(3)], 64 << 10) as sender:
        for name, path in files.items():
            await sender.put_file(name, path)
        return await sender.finish()


def test_files_are_stored_sealed_and_known_after_a_restart(tmp_path: Path) -> None:
    contents = {"pages-1.img": os.urandom(300_000) + bytes(200_000), "empty.img": b"", "core.img": b"x" * 10}
    files = {}
    for name, content in contents.items():
        files[name] = tmp_path / name
        files[name].write_bytes(content)
    store = ImageStore(tmp_path / "store", on_disk=True)
    store.create(MOVE, 1 << 20)
    sent = asyncio.run(put(store, files))
    assert store.seal(MOVE, sent) == []
    again = ImageStore(tmp_path / "store", on_disk=True)
    assert again.sealed(MOVE)
    assert again.moves() == {MOVE}
    assert {name: (again.path(MOVE) / name).read_bytes() for name in contents} == contents


def test_failure_of_the_store_reaches_the_sender(tmp_path: Path) -> None:
    class FullStore(ImageStore):
        def write(self, move: str, frame: Frame) -> bool:
            raise Full("no space left")

    (tmp_path / "file").write_bytes(b"y" * 500_000)
    store = FullStore(tmp_path / "store", on_disk=True)
    store.create(MOVE, 1 << 20)
    with pytest.raises(SnapshotError, match="no space left"):
        asyncio.run(put(store, {"pages-1.img": tmp_path / "file"}))


def test_images_on_a_disk_leave_room_for_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal, logs and other programs use the same file system. The twentieth part of a small one is left free."""
    free = 0

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free, f_blocks=1000, f_frsize=1 << 20)

    monkeypatch.setattr(os, "statvfs", statvfs)
    store = ImageStore(tmp_path / "store", on_disk=True)
    free = 59
    with pytest.raises(Full, match="9 MiB are free"):
        store.create(MOVE, 10 << 20)
    free = 60
    store.create(MOVE, 10 << 20)
    free = 50  # another program has taken the rest meanwhile
    (tmp_path / "file").write_bytes(b"y" * 500_000)
    with pytest.raises(Full, match="images leave free"):
        asyncio.run(put(store, {"pages-1.img": tmp_path / "file"}))
    assert list((tmp_path / "store" / MOVE).iterdir()) == []
