"""Stripes that go through rings: nothing is overwritten before it was read, and nothing else is sent in its place."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from snapshotd.api.errors import Damaged, Internal
from snapshotd.inprocess.devmem import SLOT_BYTES
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import sockets
from snapshotd.transport.device import ring as rings
from snapshotd.transport.device.child import Child
from snapshotd.transport.device.control_socket import Control
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    RECORD_BYTES,
    Buffer,
    Kind,
    Record,
    digest_of,
    reply,
)
from snapshotd.transport.device.ring import Ring
from snapshotd.transport.device.send import Sender
from snapshotd.transport.device.sources import GrowingFile, SentRing
from tests.transport.device.channel import MIB, Nodes, Proxy, flip, given_to, new_ring, noise, until

RING_BYTES, BEHIND_BYTES = 8 * MIB, 3 * MIB


def put(ring: Ring, at: int, content: bytes) -> None:
    for offset, address, size in ring.pieces(at, len(content)):
        ring.view(address - ring.address, size)[:] = content[offset : offset + size]


def got(ring: Ring, at: int, length: int) -> bytes:
    return b"".join(bytes(ring.view(address - ring.address, size)) for _, address, size in ring.pieces(at, length))


class Both:
    """What the process that uses the GPU does, on one node or the other."""

    def __init__(self, ring: Ring, seed: int) -> None:
        self.ring, self.random = ring, Random(seed)

    def write(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            size = min(self.random.randint(1, 2 * MIB), len(content) - at)
            self.ring.begin(at + size, BEHIND_BYTES)
            put(self.ring, at, content[at : at + size])
            at += size
            self.ring.wrote(at)

    def read(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            size = min(self.random.randint(1, 2 * MIB), length - len(content))
            self.ring.await_written(len(content) + size)
            content += got(self.ring, len(content), size)
            self.ring.release(len(content))
        return content


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return new_ring(tmp_path / "ring", RING_BYTES)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wait that would last for ever raises TimeoutError instead, once it has begun."""

    def never(_: float) -> None:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr("snapshotd.transport.device.ring.time.sleep", never)
        yield


def content_of(seed: int, length: int) -> bytes:
    """With zeros, and with repetitions near and far."""
    random, pieces = Random(seed), [noise(MIB) for _ in range(4)] + [bytes(MIB)]
    whole = b"".join(random.choice(pieces) if random.random() < 0.4 else noise(MIB) for _ in range(length // MIB))
    return whole + noise(length % MIB)


def test_ring_that_exists_is_not_created_again(ring: Ring, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        new_ring(tmp_path / "ring", RING_BYTES)
    assert Ring(str(tmp_path / "ring")).bytes == RING_BYTES
    with pytest.raises(FileNotFoundError):
        Ring(str(tmp_path / "other"))


def test_both_processes_see_the_same_bytes_and_counters(ring: Ring, tmp_path: Path) -> None:
    other = Ring(str(tmp_path / "ring"))
    content = noise(3 * MIB)
    ring.begin(3 * MIB)
    put(ring, 0, content)
    ring.wrote(3 * MIB)
    assert other.written == 3 * MIB
    assert got(other, 0, 3 * MIB) == content
    other.release(2 * MIB)
    assert ring.released == 2 * MIB


def test_writer_waits_for_what_was_not_read(ring: Ring, impatient: None) -> None:
    ring.begin(RING_BYTES)
    with pytest.raises(TimeoutError):
        ring.begin(RING_BYTES + 1)
    ring.release(MIB)
    ring.begin(RING_BYTES + MIB)
    with pytest.raises(TimeoutError):
        ring.begin(RING_BYTES + MIB + 1)


def test_what_a_broken_connection_may_have_lost_stays(ring: Ring, impatient: None) -> None:
    ring.begin(RING_BYTES, BEHIND_BYTES)
    ring.release(5 * MIB)
    ring.begin(RING_BYTES + 2 * MIB, BEHIND_BYTES)
    with pytest.raises(TimeoutError):
        ring.begin(RING_BYTES + 2 * MIB + 1, BEHIND_BYTES)
    assert ring.still_has(2 * MIB)
    assert not ring.still_has(2 * MIB - 1), "the writer may have begun to overwrite it"


def test_reader_waits_for_what_was_not_written(ring: Ring, impatient: None) -> None:
    ring.begin(MIB)
    with pytest.raises(TimeoutError):
        ring.await_written(1)
    ring.wrote(MIB)
    ring.await_written(MIB)


def test_reader_that_begins_further_back_takes_nothing_back(ring: Ring) -> None:
    ring.release(5 * MIB)
    ring.release(3 * MIB)
    assert ring.released == 5 * MIB


@pytest.mark.parametrize("length", [0, 5, RING_BYTES, 41 * MIB + 12345])
async def test_all_bytes_arrive_through_rings_on_both_nodes(nodes: Nodes, length: int) -> None:
    content = content_of(length, length)
    here = new_ring(nodes.here / "a", RING_BYTES)
    async with nodes.both(["a"], ring_bytes=RING_BYTES) as (incoming, outgoing, _):
        writing = asyncio.create_task(in_thread(Both(here, 1).write, content))
        reading = asyncio.create_task(in_thread(Both(Ring(str(nodes.there / "a")), 2).read, length))
        outgoing.advance("a", min(1, length))  # afterwards it looks by itself
        await writing
        outgoing.finish({"a": length})
        totals, sizes, arrived = await asyncio.gather(outgoing.wait(), incoming.wait(60), reading)
    assert arrived == content
    assert sizes == {"a": length} == {"a": totals.sent + totals.zero + totals.same}
    if length > RING_BYTES:
        assert totals.zero > MIB < totals.same
    assert not (nodes.there / "a.done").exists(), "a daemon that restarts must not take a ring for a whole stripe"


@pytest.mark.parametrize("position", [0, 2 * MIB + 1000, 20 * MIB])
async def test_cut_connection_is_replaced_and_continues_in_the_rings(nodes: Nodes, position: int) -> None:
    content = noise(41 * MIB + 5)
    here = new_ring(nodes.here / "a", 64 * MIB)  # sockets hold more than BEHIND_BYTES of a small one

    def cut(number: int, passed: int, part: bytes) -> bytes | None:
        return None if number == 0 and passed + len(part) > position else part

    async with nodes.both(["a"], cut, ring_bytes=RING_BYTES) as (incoming, outgoing, proxy):
        writing = asyncio.create_task(in_thread(Both(here, 1).write, content))
        reading = asyncio.create_task(in_thread(Both(Ring(str(nodes.there / "a")), 2).read, len(content)))
        outgoing.advance("a", 1)
        await writing
        outgoing.finish({"a": len(content)})
        await asyncio.gather(outgoing.wait(), incoming.wait(60))
        assert proxy.connections == 2
        assert await reading == content


async def test_cut_connection_is_replaced_while_the_ring_of_the_target_is_full(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that empties it is being replaced. The new connection is answered meanwhile."""
    monkeypatch.setattr("snapshotd.transport.device.outgoing.CONNECT_S", 2.0)
    content = noise(12 * MIB)
    sizes = nodes.fill({"a": content})
    async with (
        nodes.incoming(["a"], ring_bytes=4 * MIB) as incoming,
        Proxy(incoming.port) as proxy,
        nodes.outgoing(proxy.port, incoming.key, ["a"]) as outgoing,
    ):
        there = Ring(str(nodes.there / "a"))
        outgoing.advance("a", len(content))
        outgoing.finish(sizes)
        await until(lambda: there.written == 4 * MIB)
        for connections in (2, 3):
            proxy.cut()
            await until(lambda wanted=connections: proxy.connections == wanted)  # type: ignore[misc]
        reading = asyncio.create_task(in_thread(Both(there, 2).read, len(content)))
        await asyncio.gather(incoming.wait(60), outgoing.wait())
        assert await reading == content


@pytest.mark.parametrize("number", [1, 9])
async def test_damaged_record_is_not_in_the_ring_and_is_sent_again(plain: Nodes, number: int) -> None:
    """The ninth repeats the first one, and its header says so."""
    one = noise(RECORD_BYTES)
    content = one + noise(7 * RECORD_BYTES) + one + noise(3 * RECORD_BYTES)
    sizes = plain.fill({"a": content})
    at = plain.record(number) + HEADER_BYTES + 1000 if number == 1 else plain.record(8) + 30
    async with (
        plain.incoming(["a"], ring_bytes=RING_BYTES) as incoming,
        Proxy(incoming.port, flip(at)) as proxy,
        plain.outgoing(proxy.port, incoming.key, ["a"]) as outgoing,
    ):
        there = Ring(str(plain.there / "a"))
        reading = asyncio.create_task(in_thread(Both(there, 2).read, len(content)))
        outgoing.finish(sizes)
        totals, _ = await asyncio.gather(outgoing.wait(), incoming.wait(60))
        assert await reading == content
        assert proxy.connections == 2
        assert totals.same >= RECORD_BYTES


def test_sizes_leave_room_for_all_that_is_under_way() -> None:
    """Else a move hangs, or does not survive a broken connection."""
    assert rings.RING_BYTES % RECORD_BYTES == 0
    assert 2 * SLOT_BYTES + RECORD_BYTES <= rings.RING_BYTES - rings.BEHIND_BYTES
    assert rings.TWINS_BYTES + MAX_RECORD_BYTES <= rings.RING_BYTES
    in_buffers = 2 * 2 * sockets._BUFFER_BYTES  # of both sockets; the kernel doubles them
    assert in_buffers + 2 * RECORD_BYTES <= rings.BEHIND_BYTES


async def test_no_more_is_received_than_the_ring_holds(nodes: Nodes) -> None:
    content = noise(12 * MIB)
    sizes = nodes.fill({"a": content})
    async with (
        nodes.incoming(["a"], ring_bytes=4 * MIB) as incoming,
        nodes.outgoing(incoming.port, incoming.key, ["a"]) as outgoing,
    ):
        there = Ring(str(nodes.there / "a"))
        outgoing.advance("a", len(content))
        outgoing.finish(sizes)
        await until(lambda: there.written == 4 * MIB)
        await asyncio.sleep(0.1)
        assert there.written == 4 * MIB
        assert got(there, 0, 4 * MIB) == content[: 4 * MIB]
        there.release(4 * MIB)
        await until(lambda: there.written == 8 * MIB)
        there.release(8 * MIB)
        await asyncio.gather(incoming.wait(60), outgoing.wait())
        assert got(there, 8 * MIB, 4 * MIB) == content[8 * MIB :]


async def test_target_that_has_less_than_the_ring_is_an_error(tmp_path: Path) -> None:
    """It has lost more than stays behind what was sent. Other bytes lie there now."""
    ring = new_ring(tmp_path / "a", RING_BYTES)
    grown = os.eventfd(0)
    child = await Child.start("snapshotd.transport.device.send", {"path": str(tmp_path / "a"), "ring": True}, [grown])
    try:
        assert await child.hear() == {"ready": True}
        ring.begin(RING_BYTES)
        put(ring, 0, noise(RING_BYTES))
        ring.wrote(RING_BYTES)
        with given_to(child) as receiver:
            receiver.sendall(reply(Kind.HAVE, 0))
            assert await child.hear() == {"connected": 0}
            os.eventfd_write(grown, 1)
            received = 0
            while received < RING_BYTES:
                received += len(await in_thread(receiver.recv, MIB))
        assert "lost" in await child.hear()
        ring.begin(RING_BYTES + 2 * MIB)
        with given_to(child) as receiver:
            receiver.sendall(reply(Kind.HAVE, MIB))
            with pytest.raises(Internal, match=r"that follow 1048576 were overwritten"):
                await child.hear()
            assert receiver.recv(1000, socket.MSG_DONTWAIT) == b""
    finally:
        await child.close()
        os.close(grown)


async def test_bytes_that_are_overwritten_while_they_are_sent_end_the_stripe(tmp_path: Path) -> None:
    """Whatever was sent in their place, the target never learns that the stripe is complete."""
    ring, path = new_ring(tmp_path / "a", RING_BYTES), str(tmp_path / "a")

    class Overwritten(SentRing):
        def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
            ring.release(MIB)
            ring.begin(RING_BYTES + MIB)
            return super().read(buffer, offset, length)

    ours, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    grown = os.eventfd(0)
    control = Control.__new__(Control)
    control._line = ours
    connection, receiver = socket.socketpair()
    ring.begin(RING_BYTES)
    ring.wrote(RING_BYTES)
    with ours, daemon, receiver, connection:
        sender = Sender(control, path, grown, Overwritten(path))
        connected = connection.dup()
        os.eventfd_write(grown, 1)
        receiver.sendall(reply(Kind.HAVE, 0))
        daemon.send(b'{"final": 8388608}')
        socket.send_fds(daemon, [b"{}"], [connected.fileno()])
        with connected, pytest.raises(Exception, match="were overwritten"):
            sender.run()
    os.close(grown)


@pytest.mark.parametrize(
    "record",
    [Record(Kind.DATA, 3 * MIB, 0, 0, bytes(16)), Record(Kind.ZERO, 3 * MIB, 0, 0, bytes(16))],
)
async def test_record_that_does_not_fit_the_ring_is_refused(tmp_path: Path, record: Record) -> None:
    settings = {"expected_bytes": 0, "ring_bytes": 2 * MIB, "path": str(tmp_path / "a")}
    child = await Child.start("snapshotd.transport.device.receive", settings)
    try:
        assert await child.hear() == {"ready": True}
        with given_to(child) as sender:
            assert await child.hear() == {"connected": 0}
            sender.sendall(record.header())
            with pytest.raises(Damaged, match="go across the end of a ring"):
                await child.hear()
    finally:
        await child.close()


def test_equal_bytes_are_referred_to_only_within_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = noise(RECORD_BYTES), noise(RECORD_BYTES)
    content = one + other + one + other * 3 + one + one
    (tmp_path / "file").write_bytes(content)
    ring = new_ring(tmp_path / "ring", RING_BYTES)
    put(ring, 0, content)
    ring.wrote(len(content))
    monkeypatch.setattr(SentRing, "window_bytes", 2 * RECORD_BYTES)
    sources = GrowingFile(str(tmp_path / "file")), SentRing(str(tmp_path / "ring"))
    ours, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    grown = os.eventfd(0)
    control = Control.__new__(Control)
    control._line = ours
    found = []
    with ours, daemon:
        for source in sources:
            sender = Sender(control, "", grown, source)
            assert source.available(len(content)) == len(content)
            records = []
            for number in range(8):
                sender._offset = number * RECORD_BYTES
                record, data = sender._record(RECORD_BYTES)
                assert (bytes(data), record.digest) == (
                    content[number * RECORD_BYTES :][:RECORD_BYTES],
                    digest_of(data),
                )
                records.append(record.twin // RECORD_BYTES if record.kind is Kind.SAME else None)
            found.append(records)
    os.close(grown)
    assert found == [[None, None, 0, 1, 1, 1, 0, 0], [None, None, 0, 1, None, 4, None, 6]]
