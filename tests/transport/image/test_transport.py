"""From pipes and files on the source to sealed images on the target, over gRPC and bulk connections, with all failures."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Damaged, Denied, Full, Internal, NotFound, Unreachable, Unreadable, Where, WrongState
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.bulk_sender import open_streams
from snapshotd.transport.image.fifo import make_fifo
from snapshotd.transport.image.frame import PAGE_BYTES
from snapshotd.transport.image.grpc_channel import WINDOW, PushCall
from snapshotd.transport.image.sender import MAX_SENDS, Sender
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.routes import Route
from tests.transport.image.targets import MOVE, Serve

CHUNK_BYTES = 64 << 10


def sparse(seed: int, pages: int, tail: int = 0) -> bytes:
    """Random pages, a third of them zero, in runs."""
    dice = random.Random(seed)
    parts: list[bytes] = []
    while len(parts) < pages:
        zero = dice.random() < 0.3
        parts += [bytes(PAGE_BYTES) if zero else dice.randbytes(PAGE_BYTES) for _ in range(dice.randint(1, 40))]
    return b"".join(parts[:pages]) + dice.randbytes(tail)


def write_all(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as fifo:
        view = memoryview(data)
        while view:
            view = view[fifo.write(view) :]


@pytest.fixture(autouse=True)
async def nothing_left_running() -> AsyncIterator[None]:
    """No test leaves a task or a thread of a channel behind."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:  # gRPC's own tasks end a few turns of the loop after their channel
        _, left = await asyncio.wait(left, timeout=1)
    assert not left
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("image channel ", "bulk "))]


async def test_pipes_and_files_arrive_complete_while_they_are_written(serve: Serve, tmp_path: Path) -> None:
    pipes = {"pages-1.img": sparse(1, 500, 77), "pages-2.img": sparse(2, 333), "ghost-file-1.img": b""}
    small = {"inventory.img": b"tiny", "empty.img": b"", "zeros.img": bytes(3 * CHUNK_BYTES + 1)}
    for name, data in small.items():
        (tmp_path / name).write_bytes(data)
    with (tmp_path / "holes.img").open("wb") as file:
        file.seek(10 << 20)
        file.write(b"end")
        file.truncate(20 << 20)
    totals: list[tuple[int, int]] = []
    async with serve(streams=3) as target:
        target.store.create(MOVE, 1 << 20)
        fifos = {name: make_fifo(tmp_path, name) for name in pipes}
        ended = asyncio.Event()
        async with Sender(await target.streams(), CHUNK_BYTES, lambda *total: totals.append(total)) as sender:
            readers = [asyncio.create_task(sender.put_fd(name, fd, eof=ended)) for name, fd in fifos.items()]
            for name in (
                "pages-1.img",
                "pages-2.img",
            ):  # one after the other, as a dump does; the third is never opened
                await in_thread(write_all, tmp_path / name, pipes[name])
            ended.set()
            await asyncio.gather(*readers)
            for name in (*small, "holes.img"):
                await sender.put_file(name, tmp_path / name)
            files = await sender.finish()
        assert target.store.seal(MOVE, files) == []
        assert target.authorised == [MOVE] * 3
        images = target.store.path(MOVE)
        for name, data in (pipes | small).items():
            assert (images / name).read_bytes() == data, name
        assert (images / "holes.img").read_bytes() == (tmp_path / "holes.img").read_bytes()
        assert (images / "holes.img").stat().st_blocks <= 8
    sizes = sum(map(len, (pipes | small).values())) + (20 << 20)
    assert totals[-1] == (sender.bytes_sent, sender.bytes_zero)
    assert sender.bytes_sent + sender.bytes_zero == sizes
    pages = [data[at : at + PAGE_BYTES] for data in pipes.values() for at in range(0, len(data), PAGE_BYTES)]
    assert sender.bytes_sent <= sum(len(page) for page in pages if any(page)) + 4 + PAGE_BYTES
    for fd in fifos.values():
        os.close(fd)


async def test_writer_may_pause_or_reopen_before_its_first_byte(serve: Serve, tmp_path: Path) -> None:
    async with serve() as target:
        target.store.create(MOVE, 1 << 20)
        fd = make_fifo(tmp_path, "pages-1.img")
        stored = asyncio.Event()
        async with Sender(await target.streams(), CHUNK_BYTES, lambda *_totals: stored.set()) as sender:
            reading = asyncio.create_task(sender.put_fd("pages-1.img", fd, eof=asyncio.Event()))
            os.close(os.open(tmp_path / "pages-1.img", os.O_WRONLY))
            writer = os.open(tmp_path / "pages-1.img", os.O_WRONLY)
            os.write(writer, b"a" * 100)
            await asyncio.wait_for(stored.wait(), 60)  # half a chunk is sent when the writer pauses
            os.write(writer, b"b" * 100)
            os.close(writer)
            await asyncio.wait_for(reading, 60)
            files = await sender.finish()
        assert target.store.seal(MOVE, files) == []
        assert (target.store.path(MOVE) / "pages-1.img").read_bytes() == b"a" * 100 + b"b" * 100
    os.close(fd)


async def test_dump_may_end_while_the_pipe_is_still_open(serve: Serve, tmp_path: Path) -> None:
    async with serve() as target:
        target.store.create(MOVE, 1 << 20)
        fd = make_fifo(tmp_path, "pages-1.img")
        writer = os.open(tmp_path / "pages-1.img", os.O_WRONLY)
        os.write(writer, b"all of it")
        ended = asyncio.Event()
        ended.set()
        async with Sender(await target.streams(), CHUNK_BYTES) as sender:
            await asyncio.wait_for(sender.put_fd("pages-1.img", fd, eof=ended), 60)
            assert [file.size for file in await sender.finish()] == [9]
        os.close(writer)
    os.close(fd)


async def test_chunks_held_are_limited_however_many_pipes_there_are(serve: Serve, tmp_path: Path) -> None:
    async with serve() as target:
        target.store.create(MOVE, 1 << 20)
        names = [f"pages-{number}.img" for number in range(12)]
        fifos = {name: make_fifo(tmp_path, name, 4096) for name in names}
        async with Sender(await target.streams(), CHUNK_BYTES) as sender:
            reading = [asyncio.create_task(sender.put_fd(name, fd)) for name, fd in fifos.items()]
            data = random.Random(3).randbytes(10 * CHUNK_BYTES)
            writers = [os.open(tmp_path / name, os.O_WRONLY | os.O_NONBLOCK) for name in names]
            for writer in writers:  # all have started, none has a whole chunk
                os.write(writer, data[:100])
            for writer in writers:
                os.set_blocking(writer, True)
                await in_thread(_write_rest, writer, data[100:])
            await asyncio.gather(*reading)
            files = await sender.finish()
        assert 1 < sender.peak_chunks_held <= WINDOW * target.stream_count
        assert target.store.seal(MOVE, files) == []
        assert all((target.store.path(MOVE) / name).read_bytes() == data for name in names)
    for fd in fifos.values():
        os.close(fd)


def _write_rest(writer: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]
    os.close(writer)


async def test_slow_target_holds_the_writer_back(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source reads no more from the pipe than it may hold: back-pressure reaches the writer, CRIU."""
    go_on = asyncio.Event()
    loop = asyncio.get_running_loop()
    write = ImageStore.write

    def slow_write(store: ImageStore, move: str, frame: object) -> bool:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return write(store, move, frame)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageStore, "write", slow_write)
    async with serve() as target:
        target.store.create(MOVE, 1 << 20)
        fd = make_fifo(tmp_path, "pages-1.img", CHUNK_BYTES)
        writer = os.open(tmp_path / "pages-1.img", os.O_WRONLY | os.O_NONBLOCK)
        async with Sender(await target.streams(), CHUNK_BYTES) as sender:
            reading = asyncio.create_task(sender.put_fd("pages-1.img", fd))
            data, written = random.Random(4).randbytes(40 * CHUNK_BYTES), 0
            stuck = 0
            while stuck < 20 and written < len(data):
                try:
                    written += os.write(writer, data[written:])
                    stuck = 0
                except BlockingIOError:
                    stuck += 1
                    await asyncio.sleep(0.01)
            may_hold = WINDOW * target.stream_count * CHUNK_BYTES
            assert may_hold <= written <= may_hold + 2 * CHUNK_BYTES  # what it holds, and the pipe
            go_on.set()
            os.set_blocking(writer, True)
            await in_thread(_write_rest, writer, data[written:])
            await reading
            assert target.store.seal(MOVE, await sender.finish()) == []
        assert (target.store.path(MOVE) / "pages-1.img").read_bytes() == data
    os.close(fd)


class FlipsBits:
    """Damages every n-th payload, none of them twice; or every payload every time."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: set[bytes] = set()
        self.damaged = 0

    def __call__(self, message: bytes) -> bytes:
        if len(message) < PAGE_BYTES:  # a header
            return message
        if self.every > 1:
            again = message in self.seen
            self.seen.add(message)
            if again or len(self.seen) % self.every:
                return message
        self.damaged += 1
        broken = bytearray(message)
        broken[len(broken) // 2] ^= 0x10
        return bytes(broken)


async def test_damaged_chunks_are_sent_again(serve: Serve, tmp_path: Path) -> None:
    data = sparse(5, 300)
    (tmp_path / "pages-1.img").write_bytes(data)
    flips = FlipsBits(every=3)
    async with serve(alter=flips) as target:
        target.store.create(MOVE, 1 << 20)
        async with Sender(await target.streams(), CHUNK_BYTES) as sender:
            await sender.put_file("pages-1.img", tmp_path / "pages-1.img")
            files = await sender.finish()
        assert sender.chunks_resent == flips.damaged > 2
        assert target.store.seal(MOVE, files) == []
        assert (target.store.path(MOVE) / "pages-1.img").read_bytes() == data


async def test_chunk_damaged_every_time_is_given_up(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(b"x" * CHUNK_BYTES)
    flips = FlipsBits(every=1)
    async with serve(streams=1, alter=flips) as target:
        target.store.create(MOVE, 1 << 20)
        async with Sender(await target.streams(), CHUNK_BYTES) as sender:
            await sender.put_file("pages-1.img", tmp_path / "pages-1.img")
            with pytest.raises(
                Damaged, match=rf"pages-1.img: the chunk at 0 arrived damaged {MAX_SENDS} times"
            ) as found:
                await sender.finish()
        assert found.value.where is Where.SOURCE_FROZEN
        assert flips.damaged == MAX_SENDS
        assert list(target.store.path(MOVE).iterdir()) == []


async def test_refusal_of_the_target_reaches_every_put(serve: Serve, tmp_path: Path) -> None:
    """Reading a pipe without a writer waits forever; the refusal must end that too."""
    async with serve(deny=Denied("not this one")) as target:
        fd = make_fifo(tmp_path, "pages-1.img")
        async with Sender(await target.streams(), CHUNK_BYTES, node="node-9") as sender:
            with pytest.raises(Denied, match="not this one") as refusal:
                await asyncio.wait_for(sender.put_fd("pages-1.img", fd, eof=asyncio.Event()), 60)
            assert refusal.value.of_node == "node-9"
            with pytest.raises(Denied):
                await sender.put_file("a.img", tmp_path / "pages-1.img")
            with pytest.raises(Denied):
                await sender.finish()
    os.close(fd)


async def test_unknown_and_sealed_moves_are_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(b"x")
    async with serve() as target:
        async with Sender(await target.streams()) as sender:
            await sender.put_file("a.img", tmp_path / "a.img")
            with pytest.raises(NotFound, match=MOVE):
                await sender.finish()
        target.store.create(MOVE, 1)
        assert target.store.seal(MOVE, []) == []
        async with Sender(await target.streams()) as sender:
            await sender.put_file("a.img", tmp_path / "a.img")
            with pytest.raises(WrongState, match="sealed"):
                await sender.finish()


async def test_full_target_is_reported(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.img").write_bytes(b"x" * CHUNK_BYTES)
    async with serve() as target:
        target.store.create(MOVE, 1)
        monkeypatch.setattr(ImageStore, "_free_bytes", lambda _store: 100)
        async with Sender(await target.streams()) as sender:
            await sender.put_file("a.img", tmp_path / "a.img")
            with pytest.raises(Full, match="no more memory"):
                await sender.finish()


async def test_leaving_early_leaves_nothing_behind(serve: Serve, tmp_path: Path) -> None:
    async with serve() as target:
        target.store.create(MOVE, 1)
        fd = make_fifo(tmp_path, "pages-1.img")
        streams = await target.streams()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), Sender(streams) as sender:
                await sender.put_fd("pages-1.img", fd, eof=asyncio.Event())
        target.store.drop(MOVE)
        assert target.store.held_bytes() == 0
    os.close(fd)


async def test_target_that_does_not_answer_is_unreachable(certificates: Credentials, tmp_path: Path) -> None:
    channels = [GrpcChannel(open_channel("127.0.0.1:1", certificates, "node-2")) for _ in range(2)]
    fd = make_fifo(tmp_path, "pages-1.img")
    async with Sender([PushCall(channel, MOVE) for channel in channels]) as sender:
        with pytest.raises(Unreachable):
            await asyncio.wait_for(sender.put_fd("pages-1.img", fd, eof=asyncio.Event()), 20)
    for channel in channels:
        await channel.close()
    os.close(fd)


@pytest.mark.parametrize("way", ["grpc", "bulk"])
async def test_target_killed_during_transfer_is_unreachable(
    certificates: Credentials, tmp_path: Path, way: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "integration.bench_transport", "receive", str(tmp_path / "images")),
        *(str(certificates.ca), str(certificates.cert), str(certificates.key), "1000", "node-2"),
        cwd=Path(__file__).parents[3],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    port, bulk_port, key = (await process.stdout.readline()).decode().split()
    channels = [GrpcChannel(open_channel(f"127.0.0.1:{port}", certificates, "node-2")) for _ in range(2)]
    streams: Sequence[Stream] = [PushCall(channel, "m-000000000000") for channel in channels]
    if way == "bulk":
        streams = await open_streams(
            [Route("127.0.0.1", int(bulk_port))], bytes.fromhex(key), certificates, "node-2", 2
        )
    fd = make_fifo(tmp_path, "pages-1.img")
    stored = asyncio.Event()
    async with Sender(streams, CHUNK_BYTES, lambda *_totals: stored.set()) as sender:
        reading = asyncio.create_task(sender.put_fd("pages-1.img", fd))
        writer = os.open(tmp_path / "pages-1.img", os.O_WRONLY)
        os.write(writer, b"x" * CHUNK_BYTES)
        await asyncio.wait_for(stored.wait(), 60)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unreachable) as found:
            await asyncio.wait_for(reading, 20)
        assert found.value.where is Where.SOURCE_FROZEN
    os.close(writer)
    os.close(fd)
    await process.wait()
    for channel in channels:
        await channel.close()
    leftover = ImageStore(tmp_path / "images")
    assert leftover.path("m-000000000000").is_dir()
    leftover.drop("m-000000000000")
    assert list((tmp_path / "images").iterdir()) == []


async def test_invalid_names_and_missing_files_are_refused(serve: Serve, tmp_path: Path) -> None:
    async with serve() as target:
        target.store.create(MOVE, 1)
        (tmp_path / "a.img").write_bytes(b"x")
        async with Sender(await target.streams()) as sender:
            with pytest.raises(Internal, match="cannot be the name"):
                await sender.put_file("../a.img", tmp_path / "a.img")
            with pytest.raises(Unreadable, match="No such file"):
                await sender.put_file("b.img", tmp_path / "b.img")
            await sender.put_file("a.img", tmp_path / "a.img")
            with pytest.raises(Internal, match="sent twice"):
                await sender.put_file("a.img", tmp_path / "a.img")
