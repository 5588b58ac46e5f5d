"""The source's side of the image channel: sends image files in chunks over parallel streams while CRIU still writes them.

Invariant: a chunk is kept until the target has stored it, and sent again if it arrived damaged. At most WINDOW chunks per
stream are kept at a time, however many files are being read, so the source never holds a second copy of the rank. A pipe
is read only when there is a free slot for the chunk: that is how the target's pace reaches CRIU.

The first failure of any stream ends all of them: every `put_*` and `finish` raises it, and no task is left behind. The rank
is then complete and frozen on the source; the caller decides what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from snapshotd.api.errors import Damaged, Internal, SnapshotError, Unreachable, Unreadable, Where, from_wire
from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.blocks import MIN_OFFER_BYTES, Offer
from snapshotd.transport.image.chunk_list import Chunks, summary
from snapshotd.transport.image.fifo import Stop, read_chunk, readable, unread_bytes
from snapshotd.transport.image.frame import (
    IMAGE_NAME,
    MAX_CHUNK_BYTES,
    PAGE_BYTES,
    Answer,
    Frame,
    Kind,
    hole_frame,
    raw_frame,
)
from snapshotd.transport.image.grpc_channel import WINDOW
from snapshotd.transport.image.malloc_tuning import freed_blocks_kept
from snapshotd.transport.image.sparse_file import FileChunks
from snapshotd.transport.image.stream import Stream

MAX_SENDS = 4  # a chunk that arrived damaged is sent again three times
_PATIENCE_MS = 50  # how long to wait for a writer that pauses before a partial chunk is sent


@dataclass(slots=True)
class _Held:
    """A chunk that the target has not stored yet."""

    frame: Frame
    sends: int = 0
    buffer: bytearray | None = None  # that the frame uses until then
    offer: Offer | None = None


class Sender:
    """Sends the images of one move. Use it as an async context manager; call `finish` before leaving it.

    Leaving it early, or by an exception, cancels the streams: the target then has a partial image, which it must drop.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        chunk_bytes: int = 2 << 20,
        on_bytes: Callable[[int, int], None] | None = None,
        *,
        offers: bool = False,
        node: str = "",
    ) -> None:
        """Takes over the streams, and ends them. `node`: the target.

        `offers`: the target may have blocks of regular files already, in other images: their chunks are offered (blocks.py).

        `on_bytes(bytes_sent, bytes_zero)` is called on the loop with the totals after every chunk the target has stored.
        """
        if not PAGE_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise Internal(f"chunks of {chunk_bytes} bytes: {PAGE_BYTES} to {MAX_CHUNK_BYTES} are possible")
        self.bytes_sent = 0
        self.bytes_zero = 0
        self.bytes_found = 0  # in other images on the target
        self.chunks_resent = 0
        self.peak_chunks_held = 0
        self._streams = streams
        self.strong = any(stream.strong for stream in streams)
        self.chunk_bytes = chunk_bytes
        self._on_bytes = on_bytes
        self._offers, self._node = offers, node
        self._slots = asyncio.Semaphore(WINDOW * len(streams))
        self._ready: asyncio.Queue[_Held] = asyncio.Queue()
        self._held: dict[int, _Held] = {}
        self._buffers: list[bytearray] = []  # for chunks, not in use
        self._all_stored = asyncio.Event()
        self._all_stored.set()
        self._files: dict[str, Chunks] = {}
        self._sequence = 0
        self._senders: list[asyncio.Task[None]] = []
        self._takers: list[asyncio.Task[None]] = []
        self._work: set[asyncio.Task[None]] = set()
        self._heap = contextlib.ExitStack()
        self._ending = False
        self._failure: SnapshotError | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._heap.enter_context(freed_blocks_kept())
        for stream in self._streams:
            window = asyncio.Semaphore(WINDOW)
            self._senders.append(loop.create_task(self._send_chunks(stream, window)))
            self._takers.append(loop.create_task(self._take_answers(stream, window)))
        for task in (*self._senders, *self._takers):
            task.add_done_callback(self._fail_if_broken)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.cancel()
        tasks = [*self._senders, *self._takers, *self._work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(stream.ended() for stream in self._streams), return_exceptions=True)
        self._held.clear()
        self._heap.close()

    # ------------------------------------------------------------ input

    async def put_fd(self, name: str, fd: int, *, eof: asyncio.Event | None = None) -> None:
        """Sends the content of a FIFO or pipe (O_NONBLOCK) as the file `name`.

        The file ends when the pipe has no writer after its first byte, or after `eof` is set because the dump is over. With
        `eof` None, it also ends when a writer has closed the pipe without a byte. The caller closes the descriptor.
        """
        self._begin(name)
        await self._or_failure(self._read_pipe(name, fd, eof))

    async def put_file(self, name: str, path: Path) -> None:
        """Sends a regular file, its holes as holes. It must not change meanwhile: Damaged if it becomes shorter."""
        self._begin(name)
        await self._or_failure(self._read_path(name, path))

    async def put_open_file(self, name: str, fd: int) -> None:
        """The same for a regular file that is open for reading. Moves the descriptor's position. The caller closes it."""
        self._begin(name)
        await self._or_failure(self._read_file(name, fd))

    async def put_frames(self, names: Iterable[str], read: Callable[[int], Frame | None]) -> None:
        """Sends what `read(sequence)` returns, in threads, until it returns None: chunks of these files, in any order. The
        chunks of all calls with a name have to cover its file."""
        for name in names:
            if name not in self._files:
                self._begin(name)
        await self._or_failure(self._read_frames(read))

    def filled(self, length: int, fill: Callable[[memoryview], None]) -> bytes | bytearray:
        """Memory of this length, at most that of a chunk, for a frame of `put_frames`; `fill` writes all of it. Called in its
        threads, and used again once the target has stored the chunk."""
        buffer = self._buffer()
        with memoryview(buffer) as whole, whole[:length] as view:
            fill(view)
            if length == len(buffer):
                return buffer
            data = bytes(view)
        self._buffers.append(buffer)
        return data

    async def stored(self) -> None:
        """Waits until the target has stored all that was put."""
        await self._or_failure(self._until_stored())

    async def finish(self) -> list[ImageFile]:
        """Waits until the target has stored everything and ends the streams. Returns what `seal` has to find."""
        await self._or_failure(self._end())
        return [summary(name, chunks) for name, chunks in self._files.items()]

    def _begin(self, name: str) -> None:
        if not IMAGE_NAME.fullmatch(name):
            raise Internal(f"{name[:100]!r} cannot be the name of an image file", where=Where.SOURCE_FROZEN)
        if name in self._files:
            raise Internal(f"the image file {name} is sent twice", where=Where.SOURCE_FROZEN)
        self._files[name] = {}

    # ------------------------------------------------------------ reading

    async def _read_pipe(self, name: str, fd: int, eof: asyncio.Event | None) -> None:
        offset, stop = 0, Stop.NO_WRITER
        while True:
            if stop is not Stop.FULL:  # a writer that has filled a chunk goes on, so the read itself waits for it
                await readable(fd, eof)
            over = eof is not None and eof.is_set()  # checked before the read: what was written by then is in the pipe
            if over and not unread_bytes(fd):
                break
            frame, stop = await self._read_into_slot(partial(self._pipe_chunk, name, fd, offset))
            if frame is not None:
                offset += frame.length
            if stop is Stop.FULL:
                continue
            if over or (stop is Stop.NO_WRITER and (offset or eof is None)):
                break
            if stop is Stop.NO_WRITER and eof is not None:
                # A writer closed the pipe without a byte: poll reports that for ever, so check only now and then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_MS / 1000):
                        await eof.wait()
        if not offset:  # not in a thread: most FIFOs of a dump are empty, and all of them end at the same moment
            await self._slots.acquire()
            self._sequence += 1
            self._keep(hole_frame(self._sequence, name, 0, 0, strong=self.strong))

    def _pipe_chunk(self, name: str, fd: int, offset: int, sequence: int) -> tuple[Frame | None, Stop]:
        """Reads straight into the memory from which the chunk is sent, unless it is a partial one."""
        buffer = self._buffer()
        count, stop = read_chunk(fd, buffer, _PATIENCE_MS)
        if stop is Stop.FULL:
            return raw_frame(sequence, name, offset, buffer, strong=self.strong), stop
        data = bytes(memoryview(buffer)[:count])
        self._buffers.append(buffer)
        return (raw_frame(sequence, name, offset, data, strong=self.strong) if data else None), stop

    def _buffer(self) -> bytearray:
        """One that is not in use, or a new one."""
        try:
            return self._buffers.pop()
        except IndexError:
            return bytearray(self.chunk_bytes)

    async def _read_path(self, name: str, path: Path) -> None:
        try:
            fd = await in_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Unreadable(f"{path} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
        try:
            await self._read_file(name, fd)
        finally:
            os.close(fd)

    async def _read_file(self, name: str, fd: int) -> None:
        try:
            chunks = FileChunks(name, fd, self.chunk_bytes, strong=self.strong)
            while not chunks.over:
                await self._read_into_slot(chunks.next, offers=self._offers)
        except OSError as error:
            raise Unreadable(f"{name} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error

    async def _read_frames(self, read: Callable[[int], Frame | None]) -> None:
        while (await self._read_into_slot(lambda sequence: (read(sequence), Stop.FULL)))[0] is not None:
            pass

    async def _until_stored(self) -> None:
        await self._all_stored.wait()

    async def _read_into_slot(
        self, read: Callable[[int], tuple[Frame | None, Stop]], *, offers: bool = False
    ) -> tuple[Frame | None, Stop]:
        """Runs `read(sequence)` in a thread when there is a free slot, and queues the chunk for the streams."""
        await self._slots.acquire()
        self._sequence += 1
        frame = None
        try:
            frame, stop = await in_thread(read, self._sequence)
        finally:
            if frame is None:
                self._slots.release()
        if frame is not None:
            self._keep(frame, Offer(frame) if offers and frame.length >= MIN_OFFER_BYTES else None)
        return frame, stop

    def _keep(self, frame: Frame, offer: Offer | None = None) -> None:
        """Queues a chunk that has a slot for the streams."""
        payload, buffer = frame.payload, None
        if isinstance(payload, bytearray) and len(payload) == self.chunk_bytes:
            buffer = payload
        self._held[frame.sequence] = _Held(frame, buffer=buffer, offer=offer)
        self.peak_chunks_held = max(self.peak_chunks_held, len(self._held))
        self._all_stored.clear()
        self._ready.put_nowait(self._held[frame.sequence])

    # ------------------------------------------------------------ streams

    async def _send_chunks(self, stream: Stream, window: asyncio.Semaphore) -> None:
        while True:
            await window.acquire()
            held = await self._ready.get()
            held.sends += 1
            message = held.frame if held.offer is None else await in_thread(held.offer.message)
            if not await stream.send(message):
                return  # ended: the task that receives the answers learns the reason

    async def _take_answers(self, stream: Stream, window: asyncio.Semaphore) -> None:
        try:
            while (answer := await stream.receive()) is not None:
                if answer.kind is Kind.ERROR:
                    raise from_wire(answer.text, self._node)
                self._take(answer)
                window.release()
            if not self._ending:
                raise Unreachable("the target ended the image channel before all images were sent")
        except SnapshotError as error:
            self._fail(error)

    def _take(self, answer: Answer) -> None:
        held = self._held.get(answer.sequence)
        if held is None:
            raise Damaged(f"the target answered for chunk {answer.sequence}, which is not in transit")
        frame, offer = held.frame, held.offer
        if answer.kind is not Kind.OK:
            if held.sends >= MAX_SENDS:
                raise Damaged(f"{frame.name}: the chunk at {frame.offset} arrived damaged {held.sends} times")
            if answer.kind is Kind.BAD:
                self.chunks_resent += 1
            if offer is not None:
                offer.refused(answer)
            self._ready.put_nowait(held)
            return
        del self._held[answer.sequence]
        if held.buffer is not None:
            self._buffers.append(held.buffer)
        self._files[frame.name][frame.offset] = (frame.length, frame.digest)
        self._slots.release()
        self.bytes_sent += frame.payload_bytes if offer is None else offer.sent_bytes
        self.bytes_found += 0 if offer is None else max(0, frame.payload_bytes - offer.content_bytes)
        self.bytes_zero += frame.length - frame.payload_bytes
        if not self._held:
            self._all_stored.set()
        if self._on_bytes is not None:
            self._on_bytes(self.bytes_sent, self.bytes_zero)

    async def _end(self) -> None:
        await self._all_stored.wait()
        self._ending = True
        for stream in self._streams:
            await stream.done()
        await asyncio.wait(self._takers)

    # ------------------------------------------------------------ failing

    def _fail(self, error: SnapshotError) -> None:
        if self._failure is None:
            error.where = Where.SOURCE_FROZEN
            self._failure = error
            for task in (*self._work, *self._senders):
                task.cancel()

    def _fail_if_broken(self, task: asyncio.Task[None]) -> None:
        """An unexpected exception in a stream's task must not leave `put_*` waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(Internal(f"the image channel failed unexpectedly: {error!r}"))

    async def _or_failure(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` until it is done or a stream fails; raises that failure."""
        if self._failure is not None:
            work.close()
            raise self._failure
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        try:
            await task
        except asyncio.CancelledError:
            outer = asyncio.current_task()
            if not self._failed() or (outer is not None and outer.cancelling()):
                raise
        finally:
            self._work.discard(task)
        if self._failure is not None:
            raise self._failure

    def _failed(self) -> bool:
        return self._failure is not None
