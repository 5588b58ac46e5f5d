"""The processes of a rank whose device memory leaves in stripes.

Invariant: only a process that runs, and whose memory is on its GPU, is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshotd.api.errors import RankGone, SnapshotError, Where, WrongState
from snapshotd.inprocess import devmem, sharing
from snapshotd.inprocess.devmem import DeviceMemory
from snapshotd.moves.device import stripe_files
from snapshotd.moves.device.hold import Hold
from snapshotd.proc import tree
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once


@dataclass
class Striped:
    """One process whose device memory leaves in stripes."""

    memory: DeviceMemory
    inner_pid: int
    names: list[str]
    expected_bytes: int
    slot_bytes: int = devmem.SLOT_BYTES
    sizes: list[int] = field(default_factory=list)  # of the stripes, once it is out
    hold: Hold | None = None  # it hands its memory over; None: it is copied into the files
    caught: str = ""  # where a thread was parked

    @property
    def process(self) -> Process:
        return self.memory.process

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def stripe_bytes(self) -> int:
        """What is allocated ahead for each stripe; their sizes differ slightly."""
        return self.expected_bytes // len(self.names) + self.slot_bytes

    def drop(self) -> None:
        """Releases what was prepared in the process, if it still can. Blocking."""
        with contextlib.suppress(SnapshotError):
            self.memory.drop()


async def prepare_holds(striped: Sequence[Striped], *, sends: bool) -> None:
    """As `Hold.prepare`, for each of them; none goes on behind the others' back."""
    preparing = (one.hold.prepare(sends=sends) for one in striped if one.hold is not None)
    for failed in await asyncio.gather(*preparing, return_exceptions=True):
        if isinstance(failed, BaseException):
            raise failed


async def drop_holds(striped: Sequence[Striped]) -> None:
    """Their memory is not handed over after all. Idempotent."""
    for one in striped:
        if one.hold is not None:
            await one.hold.close()
            await all_at_once(Striped.drop, [one])
        one.hold = None


def candidates(processes: Sequence[Process]) -> list[Striped]:
    """Those of these processes with enough memory for stripes. Blocking. Raises WrongState when some of it is off the GPU."""
    found = []
    for process in processes:
        with contextlib.suppress(RankGone, FileNotFoundError, ProcessLookupError):
            memory = devmem.find(process)
            if memory is None:
                continue
            if memory.offloaded():
                raise WrongState(
                    f"the device memory of process {process.pid} left its GPU in a freeze that was interrupted",
                    where=Where.SOURCE_FROZEN,
                )
            # What is shared has to leave in stripes: the driver's checkpoint does not know who else has it.
            if (size := memory.size()) >= devmem.LEAST_BYTES or sharing.is_shared(process):
                inner_pid = tree.inner_pid(process.pid)
                found.append(Striped(memory, inner_pid, stripe_files.names_of(inner_pid, devmem.STRIPES), size))
    return found
