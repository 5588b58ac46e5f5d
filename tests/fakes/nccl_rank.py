"""Runs one rank of a test of the fake: one scenario, which exits with 0 if all its assertions hold.

    python -m tests.fakes.nccl_rank LIBRARY MEETING MODULE.FUNCTION RANK NRANKS

Ranks find each other through files in the folder MEETING, so that they communicate only through the library under test.
No wait has a timeout: a rank that waits in vain hangs, until the test's own limit ends it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from ctypes import c_void_p
from pathlib import Path

from tests.fakes.nccl_calls import UNIQUE_ID_BYTES, Config, Nccl, Operator, Result, UniqueId
from tests.fakes.nccl_numbers import DataType, Number, reduced

_PF_EXITING = 0x4  # <linux/sched.h>; the thread no longer runs user code


class Buffer:
    """Memory that the library reads and writes while Python continues."""

    def __init__(self, datatype: DataType, count: int, values: Sequence[Number] | None = None) -> None:
        self.datatype = datatype
        self.count = count
        self.memory = ctypes.create_string_buffer(max(1, count * datatype.width_bytes))
        if values is not None:
            self.set(values)

    def set(self, values: Sequence[Number]) -> None:
        data = self.datatype.pack(values)
        ctypes.memmove(self.memory, data, len(data))

    @property
    def address(self) -> c_void_p:
        return c_void_p(ctypes.addressof(self.memory))

    def at(self, element: int) -> c_void_p:
        return c_void_p(ctypes.addressof(self.memory) + element * self.datatype.width_bytes)

    @property
    def values(self) -> list[Number]:
        return self.datatype.unpack(self.memory.raw[: self.count * self.datatype.width_bytes])


class Rank:
    def __init__(self, library: Path, meeting: Path, rank: int, nranks: int) -> None:
        self.library_path = library
        self.meeting = meeting
        self.rank = rank
        self.nranks = nranks
        self.nccl = Nccl(library)

    # -- between ranks

    def tell(self, name: str, content: bytes = b"") -> None:
        new = self.meeting / f"{name}.{self.rank}.new"
        new.write_bytes(content)
        new.rename(self.meeting / name)

    def hear(self, name: str) -> bytes:
        while not (self.meeting / name).exists():
            time.sleep(0.002)
        return (self.meeting / name).read_bytes()

    def hear_all_but(self, rank: int, name: str) -> None:
        for other in range(self.nranks):
            if other != rank:
                self.hear(f"{name}-{other}")

    def all_reached(self, name: str) -> None:
        self.tell(f"{name}-{self.rank}")
        self.hear_all_but(self.rank, name)

    def shared_id(self, name: str = "id", maker: int = 0) -> UniqueId:
        if self.rank == maker:
            made = self.nccl.unique_id()
            self.tell(name, ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES))
            return made
        return UniqueId.from_buffer_copy(self.hear(name))

    # -- communicators

    def world(self, name: str = "id", settings: Config | None = None) -> c_void_p:
        return self.nccl.init_rank(self.nranks, self.shared_id(name), self.rank, settings)

    def settle(self, comm: c_void_p) -> Result:
        """Polls a non-blocking communicator until it is no longer in progress."""
        while (state := self.nccl.async_error(comm)) is Result.IN_PROGRESS:
            time.sleep(0.001)
        return state

    def settle_in_error(self, comm: c_void_p) -> Result:
        """Polls until there is an asynchronous error."""
        while (state := self.nccl.async_error(comm)) in (Result.SUCCESS, Result.IN_PROGRESS):
            time.sleep(0.001)
        return state

    def synchronize(self, stream: int = 0) -> None:
        self.nccl.fakeNcclStreamSynchronize(stream)

    def busy(self, stream: int = 0) -> bool:
        return self.nccl.result_of(self.nccl.fakeNcclStreamQuery, stream) is Result.IN_PROGRESS

    def inputs(self, datatype: DataType, count: int, rank: int | None = None) -> list[Number]:
        return [datatype.value(self.rank if rank is None else rank, index) for index in range(count)]

    def check_sum(
        self, comm: c_void_p, datatype: DataType, members: Sequence[int] | None = None, count: int = 17
    ) -> None:
        """Checks one all-reduce over `comm`, whose members are these ranks of the world, in this order."""
        ranks = range(self.nranks) if members is None else members
        send, receive = Buffer(datatype, count, self.inputs(datatype, count)), Buffer(datatype, count)
        self.nccl.ncclAllReduce(send.address, receive.address, count, datatype.number, Operator.SUM, comm, 0)
        self.synchronize()
        expected = [reduced(datatype, Operator.SUM, [datatype.value(r, i) for r in ranks]) for i in range(count)]
        assert receive.values == expected


def threads() -> set[str]:
    """All threads that may still run. The kernel lists a joined thread for a moment longer, while it cleans it up."""
    return {tid for tid in os.listdir("/proc/self/task") if not _ends(tid)}


def _ends(tid: str) -> bool:
    try:
        stat = Path(f"/proc/self/task/{tid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    flags = stat[stat.rindex(")") :].split()[7]
    return bool(int(flags) & _PF_EXITING)


def joined(thread: threading.Thread) -> None:
    """Waits until the thread is not in `threads()`; Python's own join returns while it still runs."""
    thread.join()
    while str(thread.native_id) in threads():
        time.sleep(0.001)


def descriptors() -> dict[str, str]:
    """All open descriptors and their targets, except for the one that reads the folder."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def main() -> None:
    library, meeting, scenario, rank, nranks = sys.argv[1:]
    module, function = scenario.split(".")
    scenarios = importlib.import_module(f"tests.fakes.nccl_scenarios.{module}")
    getattr(scenarios, function)(Rank(Path(library), Path(meeting), int(rank), int(nranks)))


if __name__ == "__main__":
    main()
