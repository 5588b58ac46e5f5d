"""The daemon's connection to the process that keeps device memory, with a duplicate of every descriptor.

A descriptor here keeps the memory as well as one there. So what a rank has handed over outlives the holder, and the daemon
too: if the holder ends, another one gets everything again; after a restart the daemon takes duplicates of what the holder
keeps (`adopt`). The memory is lost only if both end, before either is replaced.

Invariant: what the holder keeps under a key that has duplicates is the first of them, in the same order, which is the layout
of the stripes; before any request is answered it is all of them. What a filler has the holder keep is not duplicated: a
target can lose it, because its source still has it.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path

from snapshotd.api.errors import GpuFailed, Where
from snapshotd.holder.client import PAST_ALL, Holder
from snapshotd.holder.process import BATCH
from snapshotd.inprocess.holding import HeldBlock

log = logging.getLogger(__name__)

_Duplicate = tuple[HeldBlock, int]


class BackedHolder(Holder):
    """The holder of this node's device memory. It is started again if it ends while anything needs it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._own: dict[str, list[_Duplicate]] = {}
        self._watched = 0  # the holder that has to live

    def keep(self, key: str, blocks: Sequence[HeldBlock], fds: Sequence[int]) -> None:
        """As there. If it fails, the key has to be dropped before the next one."""
        with self._lock:
            try:
                if key not in self._own and self.count(key):
                    raise GpuFailed(
                        f"the process that keeps {self._keeps} has other memory under {key}", where=Where.SOURCE_FROZEN
                    )
                self._own.setdefault(key, []).extend(self._duplicates(blocks, fds))
                self._try(lambda: self._complete(key), start=True)
            except BaseException:
                _close(self._own.pop(key, []))
                raise

    def adopt(self, key: str) -> None:
        """At start: takes duplicates of what was handed over to a daemon before this one. Raises GpuFailed."""
        with self._lock:
            found: list[_Duplicate] = []
            try:
                for blocks, fds in self.held(key):
                    found += self._duplicates(blocks, fds)
            except BaseException:
                _close(found)
                raise
            _close(self._own.pop(key, []))
            self._own[key] = found

    def drop(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                _close(self._own.pop(key, []))
            super().drop(keys)
            if self._line is None:
                self._watched = 0

    def close(self) -> None:
        """Ends the connection: from now on the holder alone keeps what it keeps."""
        with self._lock:
            for found in self._own.values():
                _close(found)
            self._own.clear()
            self._users.clear()
            self._watched = 0
            super().close()

    def _can_repeat(self, fresh: bool) -> bool:
        return True  # over a new connection every request starts from what the holder has

    def _connected(self, *, start: bool) -> bool:
        fresh = self._line is None
        if not super()._connected(start=start or self._is_needed()):
            return False
        if fresh:
            try:
                self._watch()
                for key in self._own:
                    self._complete(key)
            except BaseException:  # it must not answer yet
                self._hang_up()
                raise
        return True

    def _is_needed(self) -> bool:
        return bool(self._own or self._users)

    def _complete(self, key: str) -> None:
        """Gives the holder what it does not have under the key. Raises as `_exchange`."""
        own = self._own[key]
        answer, _ = self._exchange({"ask": "give", "key": key, "from": PAST_ALL})
        for at in range(answer["total"], len(own), BATCH):
            some = own[at : at + BATCH]
            listed = [[block.address, block.bytes, block.device] for block, _ in some]
            self._exchange({"ask": "keep", "key": key, "blocks": listed}, [fd for _, fd in some])

    def _duplicates(self, blocks: Sequence[HeldBlock], fds: Sequence[int]) -> list[_Duplicate]:
        made: list[_Duplicate] = []
        try:
            for block, fd in zip(blocks, fds, strict=True):
                made.append((block, os.dup(fd)))
        except BaseException as error:
            _close(made)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise self._too_many_files() from error
            raise
        return made

    def _watch(self) -> None:
        """Replaces the holder at once if it ends, and not only when it is asked next: this daemon may end before that."""
        pid = self.pid
        if pid == self._watched:
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise ConnectionResetError("it has ended") from error
        if self._watched:
            log.warning(
                "process %d, which kept device memory, has ended: process %d takes its place", self._watched, pid
            )
        self._watched = pid
        threading.Thread(target=self._await_end, args=(pid, handle), name="watch the holder", daemon=True).start()

    def _await_end(self, pid: int, handle: int) -> None:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll()
        os.close(handle)
        with self._lock:
            if pid == self._watched and self._is_needed():
                try:
                    self.kept()
                except GpuFailed as error:
                    log.error("this daemon alone keeps device memory until the next request: %s", error.message)


def _close(duplicates: Sequence[_Duplicate]) -> None:
    for _, fd in duplicates:
        os.close(fd)
