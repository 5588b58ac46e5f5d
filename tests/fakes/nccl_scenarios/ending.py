"""Scenarios that end communicators: what destroy and finalise wait for, what abort does not, and that nothing is left.

Every rank of a test runs the function in its own process, and asserts what that rank must see. Expected numbers are
computed in plain Python, from the known values of the other ranks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_void_p

from tests.fakes.nccl_calls import Operator, Result, UniqueId, config
from tests.fakes.nccl_numbers import FLOAT32, INT32
from tests.fakes.nccl_rank import Buffer, Rank, descriptors, joined, threads

COUNT = 13  # not a multiple of any number of ranks tested


def leaves_nothing(rank: Rank) -> None:
    """CRIU dumps a process in this state: no thread, descriptor or work on a stream may be left."""
    nccl = rank.nccl
    before_threads, before_descriptors = threads(), descriptors()
    for round_number in range(3):
        world = rank.world(f"id-{round_number}")
        child = nccl.split(world, rank.rank % 2, 0)
        assert len(threads()) == len(before_threads) + 2
        rank.check_sum(world, FLOAT32)
        if round_number == 1:
            nccl.ncclCommFinalize(child)
            nccl.ncclCommFinalize(world)
            assert threads() == before_threads
        nccl.ncclCommDestroy(child)
        if round_number == 2:
            rank.all_reached("abort")
            nccl.ncclCommAbort(world)
        else:
            nccl.ncclCommDestroy(world)
        assert threads() == before_threads
        assert descriptors() == before_descriptors
    spare = [nccl.unique_id() for _ in range(2)]
    ids = [rank.shared_id("scalable-0"), rank.shared_id("scalable-1", maker=1), rank.shared_id("scalable-2", maker=1)]
    comm = c_void_p()
    array = (UniqueId * len(ids))(*ids)
    nccl.ncclCommInitRankScalable(ctypes.byref(comm), rank.nranks, rank.rank, len(ids), array, None)
    rank.check_sum(comm, FLOAT32)
    nccl.ncclCommDestroy(comm)
    for unused in spare:  # an unused id is released by a communicator of one rank
        nccl.ncclCommDestroy(nccl.init_rank(1, unused, 0))
    rank.all_reached("end")
    assert threads() == before_threads
    assert descriptors() == before_descriptors


def destroy_waits(rank: Rank) -> None:
    """Destroy waits for launched work. The last rank launches only when the others are inside destroy."""
    nccl, comm = rank.nccl, rank.world()
    buffer = Buffer(INT32, COUNT, [1] * COUNT)
    if rank.rank == rank.nranks - 1:
        rank.hear_all_but(rank.rank, "destroying")
    nccl.ncclAllReduce(buffer.address, buffer.address, COUNT, INT32.number, Operator.SUM, comm, 0)
    rank.tell(f"destroying-{rank.rank}")
    nccl.ncclCommDestroy(comm)
    assert not rank.busy()
    assert buffer.values == [rank.nranks] * COUNT


def finalize_is_collective(rank: Rank) -> None:
    nccl, comm = rank.nccl, rank.world(settings=config(blocking=False))
    rank.settle(comm)
    if rank.rank == 0:
        rank.hear_all_but(0, "polled")
    assert nccl.result_of(nccl.ncclCommFinalize, comm) is Result.IN_PROGRESS
    if rank.rank:
        assert nccl.async_error(comm) is Result.IN_PROGRESS  # rank 0 has not finalised
        rank.tell(f"polled-{rank.rank}")
    assert rank.settle(comm) is Result.SUCCESS
    buffer = Buffer(INT32, 1)
    refused = nccl.result_of(nccl.ncclAllReduce, buffer.address, buffer.address, 1, 2, 0, comm, 0)
    assert refused is Result.INVALID_USAGE
    assert nccl.result_of(nccl.split, comm, 0, 0) is Result.INVALID_USAGE
    assert nccl.result_of(nccl.ncclCommFinalize, comm) is Result.INVALID_ARGUMENT
    nccl.ncclCommDestroy(comm)


def abort_while_a_peer_hangs(rank: Rank) -> None:
    """The peer never launches. Abort ends the operation, its stream and everything else without it."""
    nccl = rank.nccl
    before_threads, before_descriptors = threads(), descriptors()
    comm = rank.world()
    if rank.rank == 1:
        rank.hear("aborted")
        buffer = Buffer(INT32, 1)
        nccl.ncclAllReduce(buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
        assert rank.settle_in_error(comm) is Result.REMOTE_ERROR
        assert "rank 0" in nccl.last_error(comm)
        assert nccl.result_of(nccl.ncclCommDestroy, comm) is Result.REMOTE_ERROR
        assert rank.busy()
        nccl.ncclCommAbort(comm)
        assert not rank.busy()
        return
    buffer = Buffer(INT32, 1)
    destroyed: list[Result] = []
    nccl.ncclAllReduce(buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
    assert rank.busy()
    waiting = threading.Thread(target=lambda: destroyed.append(nccl.result_of(nccl.ncclCommDestroy, comm)))
    if os.environ.get("ABORT_DURING_DESTROY"):
        waiting.start()
        while nccl.result_of(nccl.async_error, comm) is Result.SUCCESS:
            pass
    nccl.ncclCommAbort(comm)
    if waiting.ident is not None:
        joined(waiting)
        assert destroyed == [Result.INTERNAL_ERROR]
    assert not rank.busy()
    assert threads() == before_threads
    assert descriptors() == before_descriptors
    rank.tell("aborted")
