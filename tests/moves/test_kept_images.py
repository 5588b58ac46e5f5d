"""Images that are kept for snapshots, and cannot be read any more: what is said, and that nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Timeout, Unreadable, Where
from snapshotd.moves import description
from snapshotd.moves.jobs import made_image
from snapshotd.moves.jobs.succession import Succession
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import sink
from snapshotd.transport.image import stall
from snapshotd.transport.image.frame import Answer, Kind
from snapshotd.transport.image.local_stream import LocalStream
from tests.moves.kept_images import FILES, Keeping, keeping

IMAGE, COPY, RESUMED = "m-000000000001", "m-000000000002", "m-000000000003"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeping:
    pki.init(tmp_path / "ca")
    return keeping(tmp_path, "node-1", tmp_path / "ca", monkeypatch)


def break_file(path: Path) -> bytes:
    """Reading it fails with ELOOP, as with EIO on a bad disk."""
    content = path.read_bytes()
    path.unlink()
    path.symlink_to("nowhere")
    return content


@pytest.mark.parametrize("kind", ["snapshot", "copy"])
async def test_image_with_a_file_that_cannot_be_read_is_not_sent(
    node: Keeping, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.keep(IMAGE, kind)
    path = node.file(IMAGE, "pages-1.img")
    content = break_file(path)
    with pytest.raises(Unreadable, match=rf"the image {IMAGE} of rank 0 of job train: .*pages-1\.img") as caught:
        await node.send(IMAGE, RESUMED)
    assert caught.value.where is Where.SUSPENDED
    assert IMAGE in caplog.text
    assert node.sealed == []
    node.received.drop(RESUMED)
    path.unlink()
    path.write_bytes(content)
    assert (await node.send(IMAGE, RESUMED))[-1].done
    for name, sent in FILES.items():
        assert (node.received.path(RESUMED) / name).read_bytes() == sent


async def test_image_on_a_disk_that_does_not_answer_is_given_up(
    node: Keeping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another node that keeps it can send it then. What waits for the disk is left behind."""
    monkeypatch.setattr(stall, "STALLED_S", 0.5)
    node.keep(IMAGE)
    path = node.file(IMAGE, "pages-1.img")
    path.unlink()
    os.mkfifo(path)  # a thread that opens it hangs
    began_s = time.monotonic()
    sending = asyncio.create_task(node.send(IMAGE, RESUMED))
    try:
        await asyncio.wait([sending], timeout=20)
        assert sending.done()
        with pytest.raises(Timeout, match=f"node-1 has sent nothing of the image {IMAGE} to node-3 for"):
            await sending
        assert time.monotonic() - began_s >= 0.5
        assert IMAGE in caplog.text
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


class Refusing(LocalStream):
    async def receive(self) -> Answer | None:
        return Answer(Kind.ERROR, text=Timeout("this node is busy").to_wire())


async def test_error_that_the_target_answers_is_one_of_the_target(
    node: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def refusing(*_: Any, **__: Any) -> AsyncIterator[list[LocalStream]]:
        yield [Refusing(node.received, RESUMED)]

    node.keep(IMAGE)
    monkeypatch.setattr(sink, "streams_to_target", refusing)
    with pytest.raises(Timeout, match="this node is busy") as caught:
        await node.send(IMAGE, RESUMED)
    assert caught.value.of_node == "node-3"


async def test_image_that_waits_for_the_disk_of_the_target_is_not_given_up(
    node: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That disk is watched as well, by what it has written."""
    monkeypatch.setattr(stall, "STALLED_S", 0.5)

    @contextlib.asynccontextmanager
    async def slow(*whom: str) -> AsyncIterator[Any]:
        async with answers(*whom) as client:

            async def seal(request: pb.SealRequest, timeout_s: float) -> pb.SealReply:
                await asyncio.sleep(1.5)
                reply: pb.SealReply = await client.target.Seal(request, timeout_s)
                return reply

            yield SimpleNamespace(target=SimpleNamespace(Seal=seal))

    answers, node.node.client = node.node.client, slow
    node.keep(IMAGE)
    assert (await node.send(IMAGE, RESUMED))[-1].done


async def test_image_whose_folder_is_gone_is_not_sent(node: Keeping) -> None:
    node.keep(IMAGE)
    for name in (*FILES, ".sealed"):
        node.file(IMAGE, name).unlink()
    node.store.path(IMAGE).rmdir()
    with pytest.raises(Unreadable, match=f"the image {IMAGE} of rank 0"):
        await node.send(IMAGE, RESUMED)


@pytest.mark.parametrize("damage", ["unreadable", "garbage", "missing"])
async def test_copy_whose_description_cannot_be_read_is_not_described(
    node: Keeping, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.keep(COPY, "copy")
    path = node.file(COPY, description.FILE)
    content = break_file(path)
    path.unlink()
    if damage == "garbage":
        path.write_text(json.dumps({"root": "no"}))
    elif damage == "unreadable":
        path.mkdir()
    with pytest.raises(Unreadable, match=f"the image {COPY} of rank 0 of job train: "):
        await node.images.describe(COPY)
    assert COPY in caplog.text
    if damage == "unreadable":
        path.rmdir()
    path.write_bytes(content)
    assert (await node.images.describe(COPY)).facts.source_node == "node-1"


@pytest.mark.parametrize("damage", ["unreadable", "garbage", "no image"])
async def test_unreadable_image_does_not_hide_the_others_from_a_successor(
    node: Keeping, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = node.keep(IMAGE)
    copy = node.keep(COPY, "copy")
    copy.mark(Mark.SETTLED, asked_copies=2)
    made_image.save(copy, pb.MadeImage(node="node-1"))
    jobs: Any = SimpleNamespace(promises=SimpleNamespace(of=lambda record: None))
    nothing: Any = None
    succession = Succession(node.node, jobs, node.images, nothing, nothing, nothing)
    found = [(one.image, one.copies, one.made_on) for one in (await succession.kept()).images]
    assert found == [(IMAGE, 0, ""), (COPY, 2, "node-1")]
    path = node.file(IMAGE, description.FILE)
    match damage:
        case "unreadable":
            break_file(path)
        case "garbage":
            path.write_text("{")
        case _:
            shutil.rmtree(path.parent)
    (left,) = (await succession.kept()).images
    assert (left.image, left.is_copy, left.record) == (COPY, True, bad.begin.coordinator)
    assert IMAGE in caplog.text
    if damage != "no image":
        path.unlink()
        path.write_bytes(FILES[description.FILE])
        assert len((await succession.kept()).images) == 2
