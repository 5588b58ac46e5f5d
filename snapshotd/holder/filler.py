"""The process that fills memory on the GPU of a target from stripe files: `python -m snapshotd.holder.filler`.

The counterpart of the copier: it creates the memory of a rank that is on its way, passes its descriptors to the holder
(snapshotd/holder/process.py), and copies the stripes into it while they arrive. What has been copied is removed from the
files, so a move needs the same host memory whatever the size of the rank. It may die at any time: the holder keeps the memory
and what is in it, and a new one continues.

The daemon's messages: the settings; {"blocks": [[address, bytes, device], …], "more": whether others follow}, as the
source's process had them mapped; {"arrived": [bytes of each stripe that are verified]}. Answers: {"ready": true};
{"allocated": bytes}; {"filled": [bytes of each stripe]}; {"last": number of a stripe that is complete}; {"error": text,
"code": code}.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapshotd.holder import stripe_child
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import DriverError, Gpu, chunks
from snapshotd.holder.process import BATCH, MESSAGE_BYTES
from snapshotd.inprocess.holding import HeldBlock

_SLOTS = 2


class Filler:
    def __init__(self, line: socket.socket, settings: dict[str, Any]) -> None:
        self._line = line
        self._slot_bytes: int = settings["slot_bytes"]
        self._behind_bytes: int = settings["behind_bytes"]
        self._key: str = settings["key"]
        self._holder = Holder(Path(settings["holder"]))
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in settings["files"]]
        self._gpu = Gpu(settings["gpu"])
        self._slots = [[self._gpu.pinned(self._slot_bytes) for _ in range(_SLOTS)] for _ in self._files]
        self._blocks: list[HeldBlock] = []
        self._places: list[tuple[int, int]] = []  # where each is mapped here, and its bytes
        self._from: list[int] = settings["from"]  # what an earlier process has filled
        self._filled = list(self._from)
        self._arrived = [0] * len(self._files)
        self._changed = threading.Condition()
        self._saying = threading.Lock()

    def run(self) -> None:
        """Until the daemon closes the socket."""
        self._say(ready=True)
        while True:
            blob = self._line.recv(MESSAGE_BYTES)
            if not blob:
                return
            message = json.loads(blob)
            if "arrived" in message:
                with self._changed:
                    self._arrived = message["arrived"]
                    self._changed.notify_all()
            if "blocks" in message:
                self._blocks += [HeldBlock(*block) for block in message["blocks"]]
                if not message["more"]:
                    self._allocate()
                    for number in range(len(self._files)):
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
        """Fills one stripe's share, two chunks at a time: one out of the file, one on its way to the GPU."""
        self._gpu.enter()
        streams = [self._gpu.stream() for _ in range(_SLOTS)]
        todo = chunks(self._places, number, len(self._files), self._slot_bytes)
        at = freed = 0
        while todo and at < self._from[number]:
            at += todo.pop(0)[1]
        on_its_way = 0  # of the previous chunk
        for index, (address, size) in enumerate(todo):
            slot = index % _SLOTS
            self._read(number, self._slots[number][slot], at + on_its_way, size)
            self._gpu.copy_in(address, self._slots[number][slot], size, streams[slot])
            if index:
                self._gpu.wait(streams[1 - slot])
                at += on_its_way
                freed = self._remove(number, at, freed)
                self._report(number, at)
            on_its_way = size
        if todo:
            self._gpu.wait(streams[(len(todo) - 1) % _SLOTS])
        self._report(number, at + on_its_way, last=True)

    def _read(self, number: int, to: int, at: int, size: int) -> None:
        """Waits until these bytes have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived[number] >= at + size)
        data = memoryview((ctypes.c_char * size).from_address(to)).cast("B")
        done = 0
        while done < size:
            got = os.preadv(self._files[number], [data[done:]], at + done)
            if not got:
                raise OSError(f"the file ends before {at + size} bytes, which have arrived")
            done += got

    def _remove(self, number: int, filled: int, freed: int) -> int:
        """Removes what is too far behind. Returns what was removed."""
        gone = (filled - self._behind_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if gone <= freed:
            return freed
        stripe_child.remove(self._files[number], freed, gone)
        return gone

    def _report(self, number: int, at: int, *, last: bool = False) -> None:
        with self._changed:
            self._filled[number] = at
            filled = list(self._filled)
        self._say(filled=filled, **({"last": number} if last else {}))

    def _say(self, **message: Any) -> None:
        with self._saying:
            self._line.send(json.dumps(message).encode())


if __name__ == "__main__":
    stripe_child.main(Filler)
