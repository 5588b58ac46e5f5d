"""Scenarios with faults from the environment or a file, and the recovery from them.

Every rank of a test runs the function in its own process, and asserts what that rank must see. Expected numbers are
computed in plain Python, from the known values of the other ranks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_void_p
from pathlib import Path

from tests.fakes.nccl_calls import Operator, Result, UniqueId, config
from tests.fakes.nccl_numbers import FLOAT16, FLOAT32, INT32, reduced
from tests.fakes.nccl_rank import Buffer, Rank, descriptors, joined, threads

COUNT = 13  # not a multiple of any number of ranks tested


def survives_failure(rank: Rank) -> None:
    """A fault is injected once, at POINT of rank 1 or of all ranks: the call returns RESULT, and a retry succeeds."""
    nccl, point, expected = rank.nccl, os.environ["POINT"], Result[os.environ["RESULT"]]
    before_threads, before_descriptors = threads(), descriptors()
    if point == "id":
        if rank.rank == 0:
            assert nccl.result_of(nccl.unique_id) is expected
    elif point == "init" and rank.rank:
        first = UniqueId.from_buffer_copy(rank.hear("first"))
        assert nccl.result_of(nccl.init_rank, rank.nranks, first, rank.rank) is expected
        assert "as asked for" in nccl.last_error()
        rank.tell("failed")
    elif point == "init":
        # This rank waits for the one that failed, and aborts.
        first, comm = nccl.unique_id(), c_void_p()
        settings = config(blocking=False)
        nccl.result_of(nccl.ncclCommInitRankConfig, ctypes.byref(comm), rank.nranks, first, 0, ctypes.byref(settings))
        rank.tell("first", bytes(first))
        rank.hear("failed")
        assert nccl.async_error(comm) is Result.IN_PROGRESS
        nccl.ncclCommAbort(comm)
    else:
        _fail_once(rank, point, expected)
    rank.all_reached("again")
    comm = rank.world("again")
    rank.check_sum(comm, FLOAT16)
    rank.check_sum(comm, FLOAT16)
    nccl.ncclCommDestroy(nccl.split(comm, 0, 0))
    nccl.ncclCommFinalize(comm)
    nccl.ncclCommDestroy(comm)
    assert threads() == before_threads
    assert descriptors() == before_descriptors


def _fail_once(rank: Rank, point: str, expected: Result) -> None:
    nccl, comm, hit = rank.nccl, rank.world(), rank.rank == 1
    if point in ("call", "run"):
        rank.check_sum(comm, FLOAT32)  # the second one fails
        buffer = Buffer(INT32, 1)
        everywhere = "*" in os.environ["FAKE_NCCL_FAULT"]
        call = (nccl.ncclAllReduce, buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
        at_call = point == "call" and (hit or everywhere)
        assert nccl.result_of(*call) is (expected if at_call else Result.SUCCESS)
        assert rank.busy() is not at_call
        if point == "run" and hit:
            assert rank.settle_in_error(comm) is expected
            assert nccl.result_of(*call) is expected
            assert rank.busy()
    elif point == "split":
        patient = rank.world("patient", config(blocking=False))
        rank.settle(patient)
        child = c_void_p()
        assert nccl.result_of(nccl.ncclCommSplit, patient, 0, 0, ctypes.byref(child), None) is Result.IN_PROGRESS
        if hit:
            assert rank.settle(child) is expected
        rank.all_reached("split")
        nccl.ncclCommAbort(child)
        nccl.ncclCommAbort(patient)
    elif point == "finalize" and hit:
        assert nccl.result_of(nccl.ncclCommFinalize, comm) is expected
    elif point in ("destroy", "abort") and hit:
        end = nccl.ncclCommDestroy if point == "destroy" else nccl.ncclCommAbort
        assert nccl.result_of(end, comm) is expected
        assert nccl.async_error(comm) is Result.SUCCESS  # it still exists
    rank.all_reached("failed")
    nccl.ncclCommAbort(comm)


def hangs_until_called_off(rank: Rank) -> None:
    """The fault file makes rank 1 hang while the job runs. When the entry is removed, the job continues normally."""
    nccl, point, faults = rank.nccl, os.environ["POINT"], Path(os.environ["FAKE_NCCL_FAULT_FILE"])
    warm = rank.world("warm")
    rank.check_sum(warm, FLOAT32)
    rank.all_reached("warm")
    if rank.rank == 0:
        rank.tell(faults.name, f"{point}:1:1:hang\n".encode())
    rank.all_reached("faulty")

    comm = c_void_p()
    settings = config(blocking=False)
    create = nccl.ncclCommInitRankConfig
    nccl.result_of(create, ctypes.byref(comm), rank.nranks, rank.shared_id(), rank.rank, ctypes.byref(settings))
    if point == "init":
        assert nccl.async_error(comm) is Result.IN_PROGRESS
        rank.all_reached("seen")
        if rank.rank == 0:
            faults.unlink()
    assert rank.settle(comm) is Result.SUCCESS

    send, receive = Buffer(FLOAT32, COUNT, rank.inputs(FLOAT32, COUNT)), Buffer(FLOAT32, COUNT)

    def launch() -> None:
        nccl.ncclAllReduce(send.address, receive.address, COUNT, FLOAT32.number, Operator.SUM, warm, 0)

    launching = threading.Thread(target=launch)
    launching.start()
    if point != "allreduce" or rank.rank == 0:
        launching.join()
    if point.startswith("allreduce"):
        if rank.rank == 0:
            assert rank.busy()
            faults.unlink()
        launching.join()
    rank.synchronize()
    assert receive.values == [
        reduced(FLOAT32, Operator.SUM, [FLOAT32.value(r, i) for r in range(rank.nranks)]) for i in range(COUNT)
    ]

    ended = threading.Event()

    def destroy() -> None:
        nccl.ncclCommDestroy(comm)
        ended.set()

    destroying = threading.Thread(target=destroy)
    destroying.start()
    if point == "destroy" and rank.rank == 0:
        assert not ended.is_set()  # both ranks are on this host, so the call waits for rank 1
        faults.unlink()
    destroying.join()
    nccl.ncclCommDestroy(warm)


def hangs_until_aborted(rank: Rank) -> None:
    """Rank 1 hangs forever, in the call or while the operation runs; another of its threads aborts."""
    nccl, point, comm = rank.nccl, os.environ["POINT"], rank.world()
    before = len(threads())
    buffer, results = Buffer(INT32, 1), list[Result]()
    call = (nccl.ncclAllReduce, buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
    launching = threading.Thread(target=lambda: results.append(nccl.result_of(*call)))
    launching.start()
    if rank.rank == 0 or point.endswith(".run"):
        joined(launching)
        assert results == [Result.SUCCESS]
        assert rank.busy()
    rank.all_reached("launched")
    if rank.rank == 1:
        nccl.ncclCommAbort(comm)
        rank.tell("aborted")
    else:
        rank.hear("aborted")
        assert rank.settle_in_error(comm) is Result.REMOTE_ERROR
        nccl.ncclCommAbort(comm)
    joined(launching)
    if rank.rank == 1 and point == "allreduce":
        assert results[0] in (Result.INTERNAL_ERROR, Result.INVALID_ARGUMENT)
    assert not rank.busy()
    assert len(threads()) == before - 1


def sees_a_crash(rank: Rank) -> None:
    nccl, comm = rank.nccl, rank.world()
    buffer = Buffer(INT32, 1)
    nccl.ncclAllReduce(buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
    assert rank.settle_in_error(comm) is Result.REMOTE_ERROR
    # The other survivor may see the end of this rank before it sees the crash.
    rank.tell(f"seen-{rank.rank}")
    rank.hear("seen-0" if rank.rank else "seen-2")
    nccl.ncclCommAbort(comm)


def one_of_many_fails(rank: Rank) -> None:
    """One of several ranks in one process fails to join. The others do not wait for it, and none is left."""
    nccl, count = rank.nccl, 3
    before_threads, before_descriptors = threads(), descriptors()
    comms = (c_void_p * count)()
    assert nccl.result_of(nccl.ncclCommInitAll, comms, count, None) is Result.SYSTEM_ERROR
    assert list(comms) == [None] * count
    assert threads() == before_threads
    assert descriptors() == before_descriptors
    nccl.ncclCommInitAll(comms, count, None)
    for comm in comms:
        nccl.ncclCommDestroy(comm)
    assert threads() == before_threads
    assert descriptors() == before_descriptors
