"""A connection to the process that keeps device memory, or files (snapshotd/holder/process.py).

Invariant: memory is kept from the moment `keep` has returned until `drop`, whatever becomes of this process. If the holder
ends, it is lost, unless the daemon has duplicates (snapshotd/holder/backed.py). Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from snapshotd.api.errors import GpuFailed, Where
from snapshotd.holder.process import BATCH, MESSAGE_BYTES
from snapshotd.inprocess.holding import HeldBlock

_PACKAGES = Path(__file__).resolve().parents[2]
_ANSWER_S = 30.0
#: Of a request over a fresh connection.
_TRIES = 5
#: Beyond the blocks of any key: an answer has their number and no descriptor.
PAST_ALL = 1 << 31

Answer = tuple[dict[str, Any], list[int]]
_T = TypeVar("_T")


class Holder:
    """A holder of this node. It is started when it is first needed, and outlives this process while it keeps anything."""

    def __init__(self, path: Path, keeps: str = "device memory", *, starts: bool = True) -> None:
        """`keeps`: what it is for, for messages. `starts`: False where only its daemon may start it."""
        self.path, self._keeps, self._starts = path, keeps, starts
        self._lock = threading.RLock()
        self._line: socket.socket | None = None
        self._users: set[str] = set()

    def keep(self, key: str, blocks: Sequence[HeldBlock], fds: Sequence[int]) -> None:
        """Adds these to what is kept under the key; the descriptors here can be closed afterwards. Raises GpuFailed."""
        listed = [[block.address, block.bytes, block.device] for block in blocks]
        self._ask({"ask": "keep", "key": key, "blocks": listed}, fds, start=True)

    def held(self, key: str) -> Iterator[tuple[list[HeldBlock], list[int]]]:
        """What is kept under a key, in batches, in the order in which it came. Their descriptors are closed afterwards.
        Raises GpuFailed, also if some of it is lost meanwhile."""
        at = total = 0
        while True:
            answer, fds = self._ask({"ask": "give", "key": key, "from": at}, start=False)
            try:
                total = max(total, answer.get("total", 0))
                if not fds:
                    if at < total:
                        raise GpuFailed(f"the process that keeps {self._keeps} gave none", where=Where.SOURCE_FROZEN)
                    return
                yield [HeldBlock(*block) for block in answer["blocks"]], fds
                at += len(fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def count(self, key: str) -> int:
        """How many blocks are kept under a key."""
        answer, _ = self._ask({"ask": "give", "key": key, "from": PAST_ALL}, start=False)
        return int(answer.get("total", 0))

    def kept(self) -> dict[str, int]:
        """What is kept: bytes by key. Empty where no holder runs."""
        answer, _ = self._ask({"ask": "list"}, start=False)
        return dict(answer.get("keys", {}))

    def drop(self, keys: Sequence[str]) -> None:
        """Lets this memory go. Idempotent. With the last of it the holder ends, unless `start` asked for it."""
        with self._lock:
            answer, _ = self._ask({"ask": "drop", "keys": list(keys)}, start=False)
            if answer.get("left") == 0 and not self._users:
                self._hang_up()

    def start(self, user: str) -> None:
        """Makes sure that it runs until `leave`, because starting it takes a tenth of a second. Raises GpuFailed."""
        with self._lock:
            self._ask({"ask": "list"}, start=True)
            self._users.add(user)

    def leave(self, user: str) -> None:
        """It need not run for this user any more; what is kept, is kept. `drop` comes next. Idempotent."""
        with self._lock:
            self._users.discard(user)

    @property
    def pid(self) -> int:
        """Of the process that answers; 0: none."""
        with self._lock:
            if self._line is None:
                return 0
            credentials = self._line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", credentials)[0])

    def close(self) -> None:
        """Ends the connection; the holder ends too if it keeps nothing."""
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = (), *, start: bool) -> Answer:
        """The answer; an empty one where no holder runs and `start` is not set, because then nothing is kept."""
        return self._try(lambda: self._exchange(request, fds), start=start) or ({}, [])

    def _try(self, requests: Callable[[], _T], *, start: bool) -> _T | None:
        """Connects, and makes these requests. None where no holder runs and `start` is not set. Raises GpuFailed."""
        with self._lock:
            for left in reversed(range(_TRIES)):
                fresh = self._line is None
                try:
                    return requests() if self._connected(start=start) else None
                except OSError as error:
                    self._hang_up()
                    if left and isinstance(error, ConnectionResetError | BrokenPipeError) and self._can_repeat(fresh):
                        continue
                    raise GpuFailed(
                        f"the process that keeps {self._keeps} on this node does not answer: {error}",
                        where=Where.SOURCE_FROZEN,
                    ) from error
        raise AssertionError

    def _can_repeat(self, fresh: bool) -> bool:
        """Whether requests may be made again after the connection has ended. A holder that ends because it keeps nothing
        resets a connection that it has not accepted."""
        return fresh

    def _exchange(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Answer:
        """One request over the connection that there is. Raises GpuFailed, and OSError if the connection has ended."""
        line = self._line
        assert line is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        line.sendmsg([json.dumps(request).encode()], rights)
        blob, given, flags, _ = socket.recv_fds(line, MESSAGE_BYTES, BATCH)
        if not blob:
            raise ConnectionResetError("it has ended")
        if flags & socket.MSG_CTRUNC:
            for fd in given:
                os.close(fd)
            raise self._too_many_files()
        answer = json.loads(blob)
        if "error" in answer:
            raise GpuFailed(
                f"the process that keeps {self._keeps} refuses: {answer['error']}", where=Where.SOURCE_FROZEN
            )
        return answer, given

    def _too_many_files(self) -> GpuFailed:
        return GpuFailed(
            "this process can open no more files: raise the daemon's limit (LimitNOFILE=)", where=Where.SOURCE_FROZEN
        )

    def _connected(self, *, start: bool) -> bool:
        if self._line is None:
            self._line = self._connect()
        if self._line is None and start:
            if not self._starts:
                raise GpuFailed(
                    f"the process that keeps {self._keeps} on this node does not run", where=Where.SOURCE_FROZEN
                )
            self._start()
            self._line = self._connect()
            if self._line is None:
                raise ConnectionResetError("it has ended")
        return self._line is not None

    def _connect(self) -> socket.socket | None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(_ANSWER_S)
        try:
            line.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            return None
        except BaseException:
            line.close()
            raise
        return line

    def _start(self) -> None:
        """Through a shell that ends at once, so that it is not a child of this daemon, which it may outlive."""
        program = [sys.executable, "-P", "-S", "-m", "snapshotd.holder.process", str(self.path)]
        with subprocess.Popen(
            ["/bin/sh", "-c", '"$@" &', "sh", *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env={"PYTHONPATH": str(_PACKAGES), "PATH": "/usr/bin:/bin"},
        ) as shell:
            assert shell.stdout is not None
            if shell.stdout.readline() != b"ready\n":
                raise GpuFailed(f"the process that keeps {self._keeps} cannot be started", where=Where.SOURCE_RUNNING)
