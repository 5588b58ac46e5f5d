"""The process that fills memory on the GPU of a target from stripes: `python -m snapshotd.holder.filler`.

The counterpart of the copier: it creates the memory of a rank that is on its way, passes its descriptors to the holder
(snapshotd/holder/process.py), and has the GPU read the stripes while they arrive in their rings (transport/device/ring.py).
It may die at any time: the holder keeps the memory and what is in it, and a new one continues.

The daemon's messages: the settings; {"blocks": [[address, bytes, device], …], "more": whether others follow}, as the
source's process had them mapped. Answers: {"ready": true}; {"allocated": bytes}; {"filled": [bytes of each stripe], "last":
number of one that is complete}; {"error": text, "code": code}.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapshotd.holder import stripe_child
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import DriverError, Gpu, chunks
from snapshotd.holder.process import BATCH, MESSAGE_BYTES
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.transport.device.ring import Ring

#: Chunks of a stripe that are on their way to the GPU at a time.
_CHUNKS = 2


class Filler:
    def __init__(self, line: socket.socket, settings: dict[str, Any]) -> None:
        self._line = line
        self._slot_bytes: int = settings["slot_bytes"]
        self._key: str = settings["key"]
        self._holder = Holder(Path(settings["holder"]), starts=False)
        self._gpu = Gpu(settings["gpu"])
        self._rings = [Ring(path) for path in settings["files"]]
        for ring in self._rings:
            if _CHUNKS * self._slot_bytes > ring.bytes:  # it would wait for ever
                raise DriverError(f"chunks of {self._slot_bytes} bytes for a ring of {ring.bytes}")
            self._gpu.pin(ring.address, ring.bytes)
        self._blocks: list[HeldBlock] = []
        self._places: list[tuple[int, int]] = []  # where each is mapped here, and its bytes
        self._from = [ring.released for ring in self._rings]  # what an earlier process has filled
        self._filled = list(self._from)
        self._saying = threading.Lock()

    def run(self) -> None:
        """Until the daemon closes the socket."""
        self._say(ready=True)
        while True:
            blob = self._line.recv(MESSAGE_BYTES)
            if not blob:
                return
            message = json.loads(blob)
            self._blocks += [HeldBlock(*block) for block in message["blocks"]]
            if not message["more"]:
                self._allocate()
                for number in range(len(self._rings)):
                    threading.Thread(target=self._guarded, args=(number,), daemon=True).start()

    def _allocate(self) -> None:
        """Creates the memory, or maps what an earlier process has created; the rest of an unfinished attempt is dropped."""
        kept: list[HeldBlock] = []
        for blocks, fds in self._holder.held(self._key):
            kept += blocks
            self._places += [(self._gpu.map(fd, one.bytes), one.bytes) for one, fd in zip(blocks, fds, strict=True)]
        if kept != self._blocks:
            if any(self._from):
                raise DriverError(f"{len(kept)} blocks are kept, {len(self._blocks)} were created")
            self._holder.drop([self._key])
            self._places = []
            for at in range(0, len(self._blocks), BATCH):
                self._create(self._blocks[at : at + BATCH])
        self._say(allocated=sum(one.bytes for one in self._blocks))

    def _create(self, blocks: Sequence[HeldBlock]) -> None:
        fds: list[int] = []
        try:
            for one in blocks:
                address, fd = self._gpu.create(one.bytes)
                fds.append(fd)
                self._places.append((address, one.bytes))
            self._holder.keep(self._key, blocks, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _guarded(self, number: int) -> None:
        try:
            self._fill(number)
        except (OSError, DriverError) as error:
            self._say(error=f"filling from stripe {number}: {error}", code="gpu-failed")

    def _fill(self, number: int) -> None:
        """Fills one stripe's share, two chunks at a time."""
        self._gpu.enter()
        streams = [self._gpu.stream() for _ in range(_CHUNKS)]
        ring, at = self._rings[number], 0
        under_way: deque[tuple[int, ctypes.c_void_p]] = deque()  # where a chunk ends, and its stream
        for index, (address, size) in enumerate(chunks(self._places, number, len(self._rings), self._slot_bytes)):
            at += size
            if at <= self._from[number]:
                continue
            while under_way and (len(under_way) == _CHUNKS or ring.written < at):
                self._end(ring, *under_way.popleft())
            ring.await_written(at)
            stream = streams[index % _CHUNKS]
            for offset, source, length in ring.pieces(at - size, size):
                self._gpu.copy_in(address + offset, source, length, stream)
            under_way.append((at, stream))
        for one in under_way:
            self._end(ring, *one)
        self._report(number, at)

    def _end(self, ring: Ring, end: int, stream: ctypes.c_void_p) -> None:
        self._gpu.wait(stream)
        ring.release(end)

    def _report(self, number: int, at: int) -> None:
        with self._saying:
            self._filled[number] = at
            self._line.send(json.dumps({"filled": self._filled, "last": number}).encode())

    def _say(self, **message: Any) -> None:
        with self._saying:
            self._line.send(json.dumps(message).encode())


if __name__ == "__main__":
    stripe_child.main(Filler)
