"""Bulk connections through a network that changes, cuts, repeats and reorders what passes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Damaged, Unreachable
from snapshotd.transport.image.bulk_sender import BulkStream, open_streams
from snapshotd.transport.image.frame import Answer, Kind, data_frame
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.routes import Route
from tests.transport.device.channel import Proxy, flipped
from tests.transport.image.targets import MOVE, NODE, BulkTarget, Serve, hang_up

CHUNK_BYTES = 64 << 10


class Network:
    """Passes everything on until `armed`; then alters the next part that passes, once."""

    def __init__(self, alter: Callable[[bytes, bytes], bytes | None]) -> None:
        self._alter, self._last = alter, b""
        self.armed = False

    def __call__(self, _number: int, _passed: int, part: bytes) -> bytes | None:
        if not self.armed:
            self._last = part
            return part
        self.armed = False
        return self._alter(part, self._last)


WAYS: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "changed": lambda part, _: flipped(part, 30),
    "replaced": lambda part, _: bytes(len(part)),
    "repeated": lambda part, last: last[-len(part) :] + part,
    "cut": lambda part, _: None,
}


async def connected(target: BulkTarget, port: int) -> BulkStream:
    (stream,) = await open_streams([Route("127.0.0.1", port)], target.key, target.credentials, NODE, 1)
    assert await stream.send(data_frame(1, "a.img", 0, b"good"))
    assert await stream.receive() == Answer(Kind.OK, 1)
    return stream


async def send(stream: BulkStream, path: Path) -> None:
    async with Sender([stream], CHUNK_BYTES) as sender:
        await sender.put_file(path.name, path)
        await sender.finish()


@pytest.mark.parametrize("way", WAYS)
async def test_altered_chunk_is_never_stored(serve_bulk: Serve, tmp_path: Path, way: str) -> None:
    network = Network(WAYS[way])
    (tmp_path / "b.img").write_bytes(os.urandom(CHUNK_BYTES))
    async with serve_bulk(streams=1) as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1 << 20)
        async with Proxy(target.port, network) as proxy:
            stream = await connected(target, proxy.port)
            network.armed = True
            with pytest.raises(Unreachable if way == "cut" else Damaged):
                await send(stream, tmp_path / "b.img")
        assert [path.name for path in target.store.path(MOVE).iterdir()] == ["a.img"]
        good = data_frame(1, "a.img", 0, b"good")
        assert await target.answers(good.header(), b"good") == [Answer(Kind.OK, 1)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "cut"])
async def test_altered_answer_ends_the_stream(serve_bulk: Serve, way: str) -> None:
    """Also one that repeats an earlier answer: a chunk must not count as stored because another one was."""
    network = Network(WAYS[way])
    async with serve_bulk(streams=1) as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1 << 20)
        async with Proxy(target.port, None, network) as proxy:
            stream = await connected(target, proxy.port)
            network.armed = True
            assert await stream.send(data_frame(2, "b.img", 0, b"more"))
            with pytest.raises(Damaged, match="altered"):
                await stream.receive()
            await hang_up(stream)


async def test_recorded_connection_opens_nothing(serve_bulk: Serve, certificates: Credentials) -> None:
    """What passed over one connection is sent again over a new one: TLS makes other keys, and the target is not fooled."""
    recorded: list[bytes] = []

    def record(_number: int, _passed: int, part: bytes) -> bytes:
        recorded.append(part)
        return part

    async with serve_bulk(streams=1) as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1 << 20)
        async with Proxy(target.port, record, spared=False) as proxy:
            await hang_up(await connected(target, proxy.port))
        admitted = len(target.authorised)
        again = b"".join(recorded)
        async with Proxy(target.port, lambda _, passed, part: b"" if passed else again, spared=False) as proxy:
            with pytest.raises(Unreachable):
                await open_streams([Route("127.0.0.1", proxy.port)], target.key, certificates, NODE, 1)
        assert len(target.authorised) == admitted
        assert len(again) > 1000
