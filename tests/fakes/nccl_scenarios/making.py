"""Scenarios that create communicators: from ids, from others, many in one process, non-blocking, with configs, wrongly.

Every rank of a test runs the function in its own process, and asserts what that rank must see. Expected numbers are
computed in plain Python, from the known values of the other ranks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from ctypes import c_int, c_void_p
from pathlib import Path

from tests.fakes.nccl_calls import NO_COLOR, Config, Nccl, Operator, Result, config
from tests.fakes.nccl_numbers import FLOAT32, FLOAT64, INT32, INT64, reduced
from tests.fakes.nccl_rank import Buffer, Rank, descriptors, threads

COUNT = 13  # not a multiple of any number of ranks tested


def splits(rank: Rank) -> None:
    nccl, world, n, me = rank.nccl, rank.world(), rank.nranks, rank.rank

    halves = nccl.split(world, me % 2, -me)  # in descending order of ranks
    members = [r for r in reversed(range(n)) if r % 2 == me % 2]
    assert nccl.ask("ncclCommCount", halves) == len(members)
    assert nccl.ask("ncclCommUserRank", halves) == members.index(me)
    rank.check_sum(halves, FLOAT32, members)

    alone = nccl.split(world, 0 if me == 0 else NO_COLOR, 0)
    assert (alone.value is not None) == (me == 0)
    if me == 0:
        rank.check_sum(alone, FLOAT64, [0])

    again = nccl.split(halves, 0, 0)  # equal keys keep the parent's order
    rank.check_sum(again, FLOAT32, members)
    rank.check_sum(world, FLOAT32)

    # A split does not wait for an operation that waits for a peer.
    buffer = Buffer(FLOAT32, 1, [me])
    if me == 0:
        nccl.ncclSend(buffer.address, 1, FLOAT32.number, 1, world, 0)
    beside = nccl.split(world, 0, 0)
    if me == 1:
        nccl.ncclRecv(buffer.address, 1, FLOAT32.number, 0, world, 0)
    rank.synchronize()
    assert buffer.values == [0 if me == 1 else me]

    for comm in (beside, again, halves, alone, world):
        nccl.ncclCommDestroy(comm)


def shrinks(rank: Rank) -> None:
    """The last rank leaves. With the abort flag, an operation that waits for it is aborted."""
    nccl, world, n, me = rank.nccl, rank.world(), rank.nranks, rank.rank
    left = n - 1
    if me == left:
        rank.hear_all_but(left, "shrunk")
        nccl.ncclCommAbort(world)
        return
    assert nccl.result_of(nccl.shrink, world, [me]) is Result.INVALID_USAGE
    smaller = nccl.shrink(world, [left])
    rank.check_sum(smaller, FLOAT32, range(left))

    stuck = Buffer(FLOAT32, 1, [1])
    nccl.ncclAllReduce(stuck.address, stuck.address, 1, FLOAT32.number, Operator.SUM, world, 0x3000)
    assert rank.busy(0x3000)
    smallest = nccl.shrink(world, [left], 1)
    rank.synchronize(0x3000)
    rank.check_sum(smallest, FLOAT32, range(left))
    refused = nccl.result_of(nccl.ncclAllReduce, stuck.address, stuck.address, 1, 7, 0, world, 0)
    assert refused is Result.INVALID_USAGE
    for comm in (smallest, smaller, world):
        nccl.ncclCommDestroy(comm)
    rank.tell(f"shrunk-{me}")


def non_blocking(rank: Rank) -> None:
    """Every call of a non-blocking communicator returns "in progress", and is polled."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    comm = c_void_p()
    unique_id = rank.shared_id()
    if me:
        rank.hear("polled")
    settings = config(blocking=False, name="patient")
    create = nccl.ncclCommInitRankConfig
    result = nccl.result_of(create, ctypes.byref(comm), n, unique_id, me, ctypes.byref(settings))
    assert result is Result.IN_PROGRESS
    if me == 0:
        assert nccl.async_error(comm) is Result.IN_PROGRESS  # the others have not even begun
        assert nccl.result_of(nccl.ask, "ncclCommCount", comm) is Result.INVALID_ARGUMENT
        rank.tell("polled")
    assert rank.settle(comm) is Result.SUCCESS
    assert nccl.ask("ncclCommCount", comm) == n

    buffer = Buffer(INT64, COUNT, range(COUNT))
    reduce_it = (nccl.ncclAllReduce, buffer.address, buffer.address, COUNT, INT64.number, Operator.SUM, comm, 0)
    assert nccl.result_of(*reduce_it) is Result.IN_PROGRESS
    assert nccl.result_of(*reduce_it) is Result.INVALID_ARGUMENT  # the previous call was not polled
    assert rank.settle(comm) is Result.SUCCESS
    rank.synchronize()
    assert buffer.values == [n * value for value in range(COUNT)]

    child = c_void_p()
    color = NO_COLOR if me == 0 else 0
    assert nccl.result_of(nccl.ncclCommSplit, comm, color, me, ctypes.byref(child), None) is Result.IN_PROGRESS
    assert rank.settle(comm) is Result.SUCCESS
    if me:
        assert rank.settle(child) is Result.SUCCESS
        assert nccl.ask("ncclCommCount", child) == n - 1
        assert nccl.result_of(nccl.ncclCommFinalize, child) is Result.IN_PROGRESS
        assert rank.settle(child) is Result.SUCCESS
        nccl.ncclCommDestroy(child)
    nccl.ncclCommDestroy(comm)


def all_in_one_process(rank: Rank) -> None:
    """ncclCommInitAll: several ranks in one thread, on separate devices, ended one after the other."""
    nccl, count = rank.nccl, 4
    before_threads, before_descriptors = threads(), descriptors()
    for finalize in (False, True):
        comms = (c_void_p * count)()
        nccl.ncclCommInitAll(comms, count, (c_int * count)(3, 2, 1, 0))
        assert [nccl.ask("ncclCommUserRank", c_void_p(comm)) for comm in comms] == list(range(count))
        assert [nccl.ask("ncclCommCuDevice", c_void_p(comm)) for comm in comms] == [3, 2, 1, 0]
        buffers = [Buffer(FLOAT32, COUNT, rank.inputs(FLOAT32, COUNT, r)) for r in range(count)]
        nccl.ncclGroupStart()
        for comm, buffer in zip(comms, buffers, strict=True):
            nccl.ncclAllReduce(buffer.address, buffer.address, COUNT, FLOAT32.number, Operator.SUM, comm, 0)
        nccl.ncclGroupEnd()
        children = [c_void_p() for _ in comms]
        nccl.ncclGroupStart()
        for r, (comm, child) in enumerate(zip(comms, children, strict=True)):
            nccl.ncclCommSplit(comm, r % 2, 0, ctypes.byref(child), None)
        nccl.ncclGroupEnd()
        assert [nccl.ask("ncclCommCount", child) for child in children] == [2] * count
        for device in range(count):
            nccl.fakeNcclSetDevice(device)
            rank.synchronize()
        expected = [reduced(FLOAT32, Operator.SUM, [FLOAT32.value(r, i) for r in range(count)]) for i in range(COUNT)]
        assert [buffer.values for buffer in buffers] == [expected] * count
        everyone = [*children, *comms]
        if finalize:
            for comm in everyone:
                nccl.ncclCommFinalize(comm)
        for comm in everyone:
            nccl.ncclCommDestroy(comm)
        assert threads() == before_threads
        assert descriptors() == before_descriptors

    # One destroyed, the other aborted: both are gone.
    pair = (c_void_p * 2)()
    nccl.ncclCommInitAll(pair, 2, None)
    nccl.ncclCommDestroy(pair[0])
    nccl.ncclCommAbort(pair[1])
    assert threads() == before_threads
    assert descriptors() == before_descriptors


def configs(rank: Rank) -> None:
    """Only `size` bytes of a config are read; one that was not initialised is refused."""
    nccl = rank.nccl
    old = config(size=Config.trafficClass.offset)
    # An invalid pointer, which would be dereferenced if `size` were ignored.
    ctypes.memmove(ctypes.addressof(old) + Config.commName.offset, b"\1" * 8, 8)
    comm = rank.world(settings=old)
    rank.check_sum(comm, FLOAT32)
    nccl.ncclCommDestroy(comm)
    broken = config()
    broken.magic = 0
    assert nccl.result_of(nccl.init_rank, 1, nccl.unique_id(), 0, broken) is Result.INVALID_ARGUMENT


def wrong_init(rank: Rank) -> None:
    """Two ranks disagree on the number of ranks, or have the same rank: the second one gets an error."""
    nccl = rank.nccl
    for name, nranks in (("number", 2 + rank.rank), ("rank", 2)):
        settings, comm = config(blocking=False), c_void_p()
        arguments = (ctypes.byref(comm), nranks, rank.shared_id(name), 0, ctypes.byref(settings))
        assert nccl.result_of(nccl.ncclCommInitRankConfig, *arguments) is Result.IN_PROGRESS
        while not (rank.meeting / f"refused-{name}").exists():
            if nccl.async_error(comm) is Result.INVALID_USAGE:
                rank.tell(f"refused-{name}", nccl.last_error(comm).encode())
        reason = rank.hear(f"refused-{name}").decode()
        assert ("has joined already" if name == "rank" else "all must say the same") in reason
        nccl.ncclCommAbort(comm)


def stale_identity(rank: Rank) -> None:
    """Each copy of the library reads the host's address once. After a change that copy fails, and a fresh one works."""
    nccl = rank.nccl
    comm = nccl.init_rank(1, nccl.unique_id(), 0)
    nccl.ncclCommDestroy(comm)
    os.environ["FAKE_NCCL_ADDR"] = "192.0.2.77"  # an address that no host has
    nccl.ncclCommDestroy(nccl.init_rank(1, nccl.unique_id(), 0))

    copy = rank.meeting / "copy" / "libnccl.so.2"
    copy.parent.mkdir()
    shutil.copy(rank.library_path, copy)
    fresh = Nccl(copy)
    assert fresh.result_of(fresh.unique_id) is Result.SYSTEM_ERROR
    assert "192.0.2.77" in fresh.last_error()
    assert "fresh copy" in fresh.last_error()

    # Streams do not belong to a copy of the library: each copy can wait for the work of the other.
    os.environ["FAKE_NCCL_ADDR"] = "127.0.0.1"
    again = rank.meeting / "again" / "libnccl.so.2"
    again.parent.mkdir()
    shutil.copy(rank.library_path, again)
    third = Nccl(again)
    comms = (c_void_p * 2)()
    third.ncclCommInitAll(comms, 2, None)
    buffer = Buffer(INT32, 1, [1])
    third.ncclAllReduce(buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comms[0], 0x4000)
    assert rank.busy(0x4000)
    assert nccl.result_of(nccl.ask, "ncclCommCount", c_void_p(comms[0])) is Result.INVALID_ARGUMENT
    other = Buffer(INT32, 1, [2])
    third.ncclAllReduce(other.address, other.address, 1, INT32.number, Operator.SUM, comms[1], 0x5000)
    rank.synchronize(0x4000)
    assert buffer.values == [3]
    for one in comms:
        third.ncclCommDestroy(one)


def reenters(rank: Rank) -> None:
    """Runs with a preloaded library that records calls. It also sees the calls that the fake makes to its own exports."""
    nccl = rank.nccl
    comms = (c_void_p * 2)()
    nccl.ncclCommInitAll(comms, 2, None)
    buffers = [Buffer(INT32, 1, [1]), Buffer(INT32, 1, [2])]
    nccl.ncclGroupStart()
    for comm, buffer in zip(comms, buffers, strict=True):
        nccl.ncclBcast(buffer.address, 1, INT32.number, 1, comm, 0)
    nccl.ncclGroupEnd()
    for device in range(2):
        nccl.fakeNcclSetDevice(device)
        rank.synchronize()
    assert [buffer.values for buffer in buffers] == [[2], [2]]
    for comm in comms:
        nccl.ncclCommDestroy(comm)
    Path(rank.meeting / "handles").write_text(" ".join(f"{comm:#x}" for comm in comms))


def version(rank: Rank) -> None:
    assert rank.nccl.version() == int(os.environ["EXPECTED_VERSION"])


def attachments(rank: Rank) -> None:
    """Registered buffers, windows, NCCL's memory; device-side communicators are refused."""
    nccl, comm = rank.nccl, rank.world()
    memory, handle, window = c_void_p(), c_void_p(), c_void_p()
    nccl.ncclMemAlloc(ctypes.byref(memory), 5000)
    ctypes.memset(memory, 1, 5000)
    nccl.ncclCommRegister(comm, memory, 5000, ctypes.byref(handle))
    nccl.ncclCommWindowRegister(comm, memory, 5000, ctypes.byref(window), 1)
    assert handle.value != window.value
    nccl.ncclCommWindowDeregister(comm, window)
    nccl.ncclCommDeregister(comm, handle)
    assert nccl.result_of(nccl.ncclCommDeregister, comm, handle) is Result.INVALID_USAGE
    nccl.ncclCommRegister(comm, memory, 5000, ctypes.byref(handle))  # freed by destroy
    assert nccl.result_of(nccl.ncclDevCommCreate, comm, None, None) is Result.INVALID_USAGE
    assert nccl.result_of(nccl.ncclDevCommDestroy, comm, None) is Result.INVALID_USAGE
    nccl.ncclMemFree(memory)
    nccl.ncclCommDestroy(comm)
