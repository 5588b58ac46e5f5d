"""Takes the device memory of a rank over from the source's holder, where source and target are nodes of one machine and use
the same GPU, as in a lab.

No byte is sent or copied: the descriptors are duplicated, and the restored process maps the very memory that the rank had.
Such a GPU need not have room for the rank twice.

Invariant: the source's holder keeps its descriptors until the move has ended there, and the copy here does not run before
COMMIT, so an undo finds every byte as it was. Only memory that is kept under the name of this move is taken, from a process
of root that is a holder, and only if it is what the source has described.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from snapshotd.api.errors import Denied, GpuFailed, SnapshotError, Where, WrongState
from snapshotd.holder.client import Holder
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import hold
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.proc import status
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

_HOLDER = b"snapshotd.holder.process"


def socket_of(holder: Process) -> Path:
    """The socket of a holder of this machine, as this process can reach it: its node may have other mounts. Raises Denied if
    the process is none."""
    try:
        words = Path(f"/proc/{holder.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        users = set(status.read(holder.pid).user_ids)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Denied(f"process {holder.pid} does not exist on this machine") from error
    if users != {0} or words[-3:-1] != [b"-m", _HOLDER] or not words[-1].startswith(b"/") or not holder.alive():
        raise Denied(f"process {holder.pid} is not one that keeps device memory")
    return Path(f"/proc/{holder.pid}/root") / words[-1].decode().lstrip("/")


@contextlib.contextmanager
def _connected(holder: Process) -> Iterator[Holder]:
    """Raises Denied or GpuFailed."""
    there = Holder(socket_of(holder), starts=False)
    try:
        there.kept()
        if there.pid != holder.pid:  # another process has its socket by now, or it has ended
            raise Denied(f"process {holder.pid} does not answer at {there.path}")
        yield there
    finally:
        there.close()


def reaches(holder: Process) -> bool:
    """Whether that process is a holder of this machine, and answers. Blocking."""
    try:
        with _connected(holder):
            return True
    except (SnapshotError, OSError) as error:
        log.info("device memory is not taken over: %s", error)
        return False


class TakeOver:
    """All processes of one move. Used on the loop that made it."""

    part = "take-over"

    def __init__(self, node: Node, move: str, holder: Process) -> None:
        self._holder, self._move, self._from = node.holder, move, holder
        self._bytes: dict[int, int] = {}
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._over = False

    def _key(self, pid: int) -> str:
        return f"{self._move}/to-{pid}"

    async def start(self) -> None:
        """The holder here is needed when the rank is frozen."""
        await in_thread(self._holder.start, self._move)

    async def allocate(self, pid: int, blocks: Sequence[HeldBlock], key: str) -> None:
        """The memory of a process has left it, and is kept under that key: takes it over. Idempotent. If the move has
        ended, or ends meanwhile, it raises WrongState and leaves nothing."""
        await in_thread(self._take, pid, list(blocks), key)

    def _take(self, pid: int, blocks: list[HeldBlock], key: str) -> None:
        if not re.fullmatch(rf"{re.escape(self._move)}/[0-9]+", key):
            raise Denied(f"{key[:100]!r} is not memory of move {self._move}", where=Where.SOURCE_FROZEN)
        own = self._key(pid)
        with self._lock:
            self._must_be_open()
            self._keys.add(own)
            self._holder.drop([own])
        taken: list[HeldBlock] = []
        with _connected(self._from) as there:
            for some, fds in there.held(key):
                with self._lock:
                    self._must_be_open()
                    self._holder.keep(own, some, fds)
                taken += some
        if taken != blocks:
            raise GpuFailed(
                f"{len(taken)} blocks of device memory are kept for process {pid}, and not the {len(blocks)} that its source"
                " has described",
                where=Where.SOURCE_FROZEN,
            )
        self._bytes[pid] = sum(one.bytes for one in blocks)
        log.info("took over %d bytes of device memory of process %d, on the same GPU", self._bytes[pid], pid)

    def _must_be_open(self) -> None:
        """What is kept after `close` would stay on the GPU until this daemon is restarted."""
        if self._over:
            raise WrongState(f"{self._move} has ended here, or has another channel", where=Where.SOURCE_FROZEN)

    async def give(self, processes: Mapping[int, Process], device: Sequence[OffloadedMemory], limit_s: float) -> int:
        """Gives the memory to the restored processes; the bytes. It becomes their own with their next move: until COMMIT, the
        source's holder keeps it as well, and there may be no room for a copy of it."""
        for one in device:
            if self._bytes.get(one.pid) != one.total_bytes:
                raise GpuFailed(f"the memory of process {one.pid} was not taken over", where=Where.SOURCE_FROZEN)
            await in_thread(self._give, processes[one.pid], one, limit_s)
        return sum(one.total_bytes for one in device)

    def _give(self, process: Process, one: OffloadedMemory, limit_s: float) -> None:
        try:
            hold.give(self._holder, self._key(one.pid), process, len(one.stripes), one.slot_bytes, limit_s)
        except Lost as lost:
            raise GpuFailed(str(lost), where=Where.SOURCE_FROZEN) from lost

    async def close(self) -> None:
        """Releases what no process got. Idempotent. Never fails: what is left is released when the move ends here. Nothing
        is taken over afterwards."""
        try:
            await in_thread(self._close)
        except SnapshotError as error:
            log.warning("device memory of %s is not released yet: %s", self._move, error.message)

    def _close(self) -> None:
        with self._lock:  # a take-over in progress keeps nothing after this
            self._over = True
            self._holder.drop(list(self._keys))
