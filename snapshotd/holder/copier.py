"""The process that copies held memory from the GPU into stripe files: `python -m snapshotd.holder.copier`.

The files have a window: only a part of each exists at a time. What has been sent is removed from its beginning, and what
comes next is copied from the GPU. So a move needs the same host memory whatever the size of the rank. It may die at any time:
the memory is kept elsewhere (snapshotd/holder/process.py), and a new one can begin from the start.

The daemon's messages: the settings; {"begin": KEY}, what to copy, which it gets from the holder; {"sent": [bytes of each
stripe], "free": [bytes at the beginning that may be removed]}. Answers: {"ready": true}; {"done": [bytes of each stripe]};
{"last": number of a stripe that is complete}; {"error": text, "code": code}.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import threading
from pathlib import Path
from typing import Any

from snapshotd.holder import stripe_child
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import DriverError, Gpu, chunks
from snapshotd.holder.process import MESSAGE_BYTES

_SLOTS = 2


class Copier:
    def __init__(self, line: socket.socket, settings: dict[str, Any]) -> None:
        self._line = line
        self._slot_bytes: int = settings["slot_bytes"]
        self._ahead_bytes: int = settings["ahead_bytes"]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in settings["files"]]
        self._gpu = Gpu(settings["gpu"])
        self._buffers = [[self._gpu.pinned(self._slot_bytes) for _ in range(_SLOTS)] for _ in self._files]
        self._blocks: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self._holder = Path(settings["holder"])
        self._from: list[int] = settings["from"]  # what an earlier process has copied
        self._sent, self._free = list(self._from), [0] * len(self._files)
        self._done = list(self._from)
        self._saying = threading.Lock()

    def run(self) -> None:
        """Until the daemon closes the socket."""
        self._say(ready=True)
        while True:
            blob = self._line.recv(MESSAGE_BYTES)
            if not blob:
                return
            message = json.loads(blob)
            if "sent" in message:
                with self._changed:
                    self._sent, self._free = message["sent"], message["free"]
                    self._changed.notify_all()
            if "begin" in message:
                for blocks, fds in Holder(self._holder).held(message["begin"]):
                    self._blocks += [
                        (self._gpu.map(fd, one.bytes), one.bytes) for one, fd in zip(blocks, fds, strict=True)
                    ]
                for number in range(len(self._files)):
                    threading.Thread(target=self._guarded, args=(number,), daemon=True).start()

    def _guarded(self, number: int) -> None:
        try:
            self._copy(number)
        except (OSError, DriverError) as error:
            self._say(error=f"copying stripe {number}: {error}", code="gpu-failed")

    def _copy(self, number: int) -> None:
        """Copies one stripe, two chunks at a time: one on its way from the GPU, one into the file."""
        self._gpu.enter()
        streams = [self._gpu.stream() for _ in range(_SLOTS)]
        todo = chunks(self._blocks, number, len(self._files), self._slot_bytes)
        at, freed = 0, 0
        while todo and at < self._from[number]:
            at += todo.pop(0)[1]
        if todo:
            self._begin(number, 0, todo[0], streams)
        for index, (_, size) in enumerate(todo):
            if index + 1 < len(todo):
                self._begin(number, index + 1, todo[index + 1], streams)
            slot = index % _SLOTS
            self._gpu.wait(streams[slot])
            freed = self._make_room(number, at + size, freed)
            data = (ctypes.c_char * size).from_address(self._buffers[number][slot])
            done = 0
            while done < size:
                done += os.pwrite(self._files[number], memoryview(data)[done:], at + done)
            at += size
            self._report(number, at)
        self._report(number, at, last=True)

    def _begin(self, number: int, index: int, chunk: tuple[int, int], streams: list[ctypes.c_void_p]) -> None:
        address, size = chunk
        slot = index % _SLOTS
        self._gpu.copy_out(self._buffers[number][slot], address, size, streams[slot])

    def _make_room(self, number: int, end: int, freed: int) -> int:
        """Waits until the file may have bytes up to `end`, and removes what is too far behind. Returns what was removed."""
        with self._changed:
            self._changed.wait_for(lambda: end - self._sent[number] <= self._ahead_bytes)
            gone = self._free[number] // mmap.PAGESIZE * mmap.PAGESIZE
        if gone > freed:
            stripe_child.remove(self._files[number], freed, gone)
            return gone
        return freed

    def _report(self, number: int, at: int, *, last: bool = False) -> None:
        with self._changed:
            self._done[number] = at
            done = list(self._done)
        self._say(done=done, **({"last": number} if last else {}))

    def _say(self, **message: Any) -> None:
        with self._saying:
            self._line.send(json.dumps(message).encode())


if __name__ == "__main__":
    stripe_child.main(Copier)
