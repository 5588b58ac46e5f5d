"""The process that copies held memory from the GPU into stripes: `python -m snapshotd.holder.copier`.

For a move each stripe is a ring (transport/device/ring.py), which the GPU writes and another process sends. For a snapshot it
is a file that gets all of it. It may die at any time: the memory is kept elsewhere (snapshotd/holder/process.py), and another
process continues.

The daemon's messages: the settings; {"begin": KEY}, what to copy, which it gets from the holder. Answers: {"ready": true};
{"done": [bytes of each stripe]}, now and then; {"last": number of a stripe that is complete}; {"error": text, "code": code}.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from snapshotd.holder import stripe_child
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import DriverError, Gpu, chunks
from snapshotd.holder.process import MESSAGE_BYTES
from snapshotd.transport.device.records import RECORD_BYTES
from snapshotd.transport.device.ring import Pieces, Ring

#: Chunks of a stripe at a time: one on its way from the GPU, one that is passed on.
_CHUNKS = 2
#: What is copied between two messages to the daemon, which needs them for a new process.
_REPORT_BYTES = 64 << 20


class Stripe(Protocol):
    """Where one stripe goes. Chunks are begun and passed on in their order, at most _CHUNKS at a time."""

    #: How much of it an earlier process has copied.
    have: int

    def begin(self, at: int, size: int) -> Pieces:
        """Waits for room; pinned memory for the next chunk."""

    def pass_on(self, at: int, size: int) -> None:
        """The chunk has arrived in that memory."""


class SentRing:
    """Another process sends it."""

    def __init__(self, gpu: Gpu, path: str, settings: dict[str, Any]) -> None:
        self._ring = Ring(path)
        self._behind_bytes: int = settings["behind_bytes"]
        needed = _CHUNKS * settings["slot_bytes"] + RECORD_BYTES + self._behind_bytes
        if needed > self._ring.bytes:  # it would wait for ever
            raise DriverError(f"a ring of {self._ring.bytes} bytes, of which {needed} are needed")
        gpu.pin(self._ring.address, self._ring.bytes)
        self.have = self._ring.written

    def begin(self, at: int, size: int) -> Pieces:
        self._ring.begin(at + size, self._behind_bytes)
        return self._ring.pieces(at, size)

    def pass_on(self, at: int, size: int) -> None:
        self._ring.wrote(at + size)


class WholeFile:
    """All of it stays."""

    def __init__(self, gpu: Gpu, path: str, slot_bytes: int, have: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._free = deque(gpu.pinned(slot_bytes) for _ in range(_CHUNKS))
        self._begun: deque[int] = deque()
        self.have = have

    def begin(self, at: int, size: int) -> Pieces:
        self._begun.append(self._free.popleft())
        return [(0, self._begun[-1], size)]

    def pass_on(self, at: int, size: int) -> None:
        address = self._begun.popleft()
        data = memoryview((ctypes.c_char * size).from_address(address))
        done = 0
        while done < size:
            done += os.pwrite(self._file, data[done:], at + done)
        self._free.append(address)


class Copier:
    def __init__(self, line: socket.socket, settings: dict[str, Any]) -> None:
        self._line = line
        self._slot_bytes: int = settings["slot_bytes"]
        self._gpu = Gpu(settings["gpu"])
        self._stripes: list[Stripe] = [
            SentRing(self._gpu, path, settings)
            if not settings["whole"]
            else WholeFile(self._gpu, path, self._slot_bytes, settings["from"][number])
            for number, path in enumerate(settings["files"])
        ]
        self._blocks: list[tuple[int, int]] = []
        self._holder = Path(settings["holder"])
        self._saying = threading.Lock()
        self._done = [stripe.have for stripe in self._stripes]

    def run(self) -> None:
        """Until the daemon closes the socket."""
        self._say(ready=True)
        while True:
            blob = self._line.recv(MESSAGE_BYTES)
            if not blob:
                return
            for blocks, fds in Holder(self._holder, starts=False).held(json.loads(blob)["begin"]):
                self._blocks += [(self._gpu.map(fd, one.bytes), one.bytes) for one, fd in zip(blocks, fds, strict=True)]
            for number in range(len(self._stripes)):
                threading.Thread(target=self._guarded, args=(number,), daemon=True).start()

    def _guarded(self, number: int) -> None:
        try:
            self._copy(number)
        except (OSError, DriverError) as error:
            self._say(error=f"copying stripe {number}: {error}", code="gpu-failed")

    def _copy(self, number: int) -> None:
        """Copies one stripe, two chunks at a time."""
        self._gpu.enter()
        streams = [self._gpu.stream() for _ in range(_CHUNKS)]
        stripe, at = self._stripes[number], 0
        todo: list[tuple[int, int, int]] = []  # address on the GPU, place in the stripe, bytes
        for address, size in chunks(self._blocks, number, len(self._stripes), self._slot_bytes):
            if at >= stripe.have:
                todo.append((address, at, size))
            at += size
        begun, reported = 0, -1
        for index, (_, begin, size) in enumerate(todo):
            while begun < min(index + _CHUNKS, len(todo)):
                self._begin(stripe, *todo[begun], streams[begun % _CHUNKS])
                begun += 1
            self._gpu.wait(streams[index % _CHUNKS])
            stripe.pass_on(begin, size)
            if reported < 0 or begin + size - reported >= _REPORT_BYTES:
                reported = begin + size
                self._report(number, reported)
        self._report(number, at, last=True)

    def _begin(self, stripe: Stripe, address: int, at: int, size: int, stream: ctypes.c_void_p) -> None:
        for offset, to, length in stripe.begin(at, size):
            self._gpu.copy_out(to, address + offset, length, stream)

    def _report(self, number: int, at: int, *, last: bool = False) -> None:
        with self._saying:
            self._done[number] = at
            message: dict[str, Any] = {"done": self._done, **({"last": number} if last else {})}
            self._line.send(json.dumps(message).encode())

    def _say(self, **message: Any) -> None:
        with self._saying:
            self._line.send(json.dumps(message).encode())


if __name__ == "__main__":
    stripe_child.main(Copier)
