"""Scenarios that launch operations: all operations and types, groups, messages, the order of streams, and mismatches.

Every rank of a test runs the function in its own process, and asserts what that rank must see. Expected numbers are
computed in plain Python, from the known values of the other ranks.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int
from itertools import product

from tests.fakes.nccl_calls import SIM_INFO_MAGIC, Operator, Result, SimInfo, config
from tests.fakes.nccl_numbers import FLOAT32, FLOAT64, INT32, INT64, TYPES, UINT8, reduced, scaled
from tests.fakes.nccl_rank import Buffer, Rank

COUNT = 13  # not a multiple of any number of ranks tested


def reductions(rank: Rank) -> None:
    nccl, comm = rank.nccl, rank.world()
    n = rank.nranks
    for datatype, operator in product(TYPES, Operator):
        total = COUNT * n
        send = Buffer(datatype, total, rank.inputs(datatype, total))
        everyone = [rank.inputs(datatype, total, r) for r in range(n)]
        expected = [reduced(datatype, operator, [values[i] for values in everyone]) for i in range(total)]
        where = f"{datatype.name} {operator.name}"

        out = Buffer(datatype, COUNT)
        nccl.ncclAllReduce(send.address, out.address, COUNT, datatype.number, operator, comm, 0)
        rank.synchronize()
        assert out.values == expected[:COUNT], where

        out, root = Buffer(datatype, COUNT), n - 1
        target = out.address if rank.rank == root else None
        nccl.ncclReduce(send.address, target, COUNT, datatype.number, operator, root, comm, 0)
        rank.synchronize()
        assert out.values == (expected[:COUNT] if rank.rank == root else [0] * COUNT), where

        out = Buffer(datatype, COUNT)
        nccl.ncclReduceScatter(send.address, out.address, COUNT, datatype.number, operator, comm, 0)
        rank.synchronize()
        assert out.values == expected[rank.rank * COUNT : (rank.rank + 1) * COUNT], where

        nccl.ncclAllReduce(send.address, send.address, total, datatype.number, operator, comm, 0)
        rank.synchronize()
        assert send.values == expected, f"{where} in place"
    nccl.ncclCommDestroy(comm)


def moves(rank: Rank) -> None:
    nccl, comm, n = rank.nccl, rank.world(), rank.nranks
    for datatype in TYPES:
        send = Buffer(datatype, COUNT * n, rank.inputs(datatype, COUNT * n))
        everyone = [rank.inputs(datatype, COUNT * n, r) for r in range(n)]
        for root in range(n):
            out = Buffer(datatype, COUNT)
            source = send.address if rank.rank == root else None
            nccl.ncclBroadcast(source, out.address, COUNT, datatype.number, root, comm, 0)
            rank.synchronize()
            assert out.values == everyone[root][:COUNT]

            out = Buffer(datatype, COUNT, rank.inputs(datatype, COUNT))
            nccl.ncclBcast(out.address, COUNT, datatype.number, root, comm, 0)
            rank.synchronize()
            assert out.values == everyone[root][:COUNT]

            out = Buffer(datatype, COUNT * n)
            target = out.address if rank.rank == root else None
            nccl.ncclGather(send.address, target, COUNT, datatype.number, root, comm, 0)
            rank.synchronize()
            gathered = [value for values in everyone for value in values[:COUNT]]
            assert out.values == (gathered if rank.rank == root else [0] * COUNT * n)

            out = Buffer(datatype, COUNT)
            nccl.ncclScatter(source, out.address, COUNT, datatype.number, root, comm, 0)
            rank.synchronize()
            assert out.values == everyone[root][rank.rank * COUNT : (rank.rank + 1) * COUNT]

        out = Buffer(datatype, COUNT * n)
        nccl.ncclAllGather(send.address, out.address, COUNT, datatype.number, comm, 0)
        rank.synchronize()
        assert out.values == [value for values in everyone for value in values[:COUNT]]

        out = Buffer(datatype, COUNT * n)
        nccl.ncclAlltoAll(send.address, out.address, COUNT, datatype.number, comm, 0)
        rank.synchronize()
        assert out.values == [v for values in everyone for v in values[rank.rank * COUNT : (rank.rank + 1) * COUNT]]
    nccl.ncclCommDestroy(comm)


def scaled_sums(rank: Rank) -> None:
    """PreMulSum: each rank has its own factor, read at once or when the operation runs; operators belong to a
    communicator."""
    nccl, comm, other = rank.nccl, rank.world(), rank.world("other")
    for datatype, residence in product(TYPES, (0, 1)):
        factors = [datatype.value(r, 1000) for r in range(rank.nranks)]
        scalar = Buffer(datatype, 1, [factors[rank.rank]])
        number = c_int()
        nccl.ncclRedOpCreatePreMulSum(ctypes.byref(number), scalar.address, datatype.number, residence, comm)
        send, out = Buffer(datatype, COUNT, rank.inputs(datatype, COUNT)), Buffer(datatype, COUNT)
        if residence == 1:
            scalar.set([0])
        arguments = (send.address, out.address, COUNT, datatype.number, number.value)
        refused = nccl.result_of(nccl.ncclAllReduce, *arguments, other, 0)
        assert refused is Result.INVALID_ARGUMENT
        nccl.ncclAllReduce(*arguments, comm, 0)
        nccl.ncclRedOpDestroy(number.value, comm)  # allowed while it runs
        rank.synchronize()
        assert out.values == [
            reduced(
                datatype,
                Operator.SUM,
                [scaled(datatype, factors[r], datatype.value(r, i)) for r in range(rank.nranks)],
            )
            for i in range(COUNT)
        ]
        assert nccl.result_of(nccl.ncclRedOpDestroy, number.value, comm) is Result.INVALID_ARGUMENT
        rank.all_reached(f"{datatype.name}-{residence}")
    nccl.ncclCommDestroy(comm)
    nccl.ncclCommDestroy(other)


def point_to_point(rank: Rank) -> None:
    nccl, comm, n, me = rank.nccl, rank.world(), rank.nranks, rank.rank

    # Every rank to every rank, including itself, three messages each, in nested groups, some of them empty.
    lengths = (COUNT, 0, 3)
    sent, received = {}, {}
    nccl.ncclGroupStart()
    for peer, part in product(range(n), range(3)):
        values = [FLOAT32.value(me * 100 + peer * 10 + part, i) for i in range(lengths[part])]
        sent[peer, part] = Buffer(FLOAT32, lengths[part], values)
        received[peer, part] = Buffer(FLOAT32, lengths[part])
        nccl.ncclGroupStart()
        nccl.ncclRecv(received[peer, part].address, lengths[part], FLOAT32.number, peer, comm, 0)
        nccl.ncclSend(sent[peer, part].address, lengths[part], FLOAT32.number, peer, comm, 0)
        nccl.ncclGroupEnd()
    assert not rank.busy()
    nccl.ncclGroupEnd()
    rank.synchronize()
    for peer, part in product(range(n), range(3)):
        assert received[peer, part].values == [
            FLOAT32.value(peer * 100 + me * 10 + part, i) for i in range(lengths[part])
        ]

    # A long ring without groups: rank 0 sends first, the others receive first.
    count = 300_000
    ring = Buffer(INT64, count, range(count) if me == 0 else None)
    before, after = (me - 1) % n, (me + 1) % n
    if me:
        nccl.ncclRecv(ring.address, count, INT64.number, before, comm, 0)
    nccl.ncclSend(ring.address, count, INT64.number, after, comm, 0)
    if me == 0:
        rank.synchronize()
        ctypes.memset(ring.memory, 0, len(ring.memory))
        nccl.ncclRecv(ring.address, count, INT64.number, before, comm, 0)
    rank.synchronize()
    assert ring.values == list(range(count))

    # To itself, the receive must be in the same group.
    lone = Buffer(INT32, 1)
    assert nccl.result_of(nccl.ncclSend, lone.address, 1, INT32.number, me, comm, 0) is Result.INVALID_USAGE
    nccl.ncclCommDestroy(comm)


def large_both_ways(rank: Rank) -> None:
    """More than fits into socket buffers, from every rank to every rank at once."""
    nccl, comm, n = rank.nccl, rank.world(), rank.nranks
    block = 1 << 20
    send, out = Buffer(UINT8, block * n), Buffer(UINT8, block * n)
    for peer in range(n):
        ctypes.memset(send.at(peer * block), 16 * rank.rank + peer, block)
    nccl.ncclAlltoAll(send.address, out.address, block, UINT8.number, comm, 0)
    rank.synchronize()
    assert out.memory.raw[: block * n] == b"".join(bytes([16 * peer + rank.rank]) * block for peer in range(n))
    nccl.ncclCommDestroy(comm)


def waits_for_all(rank: Rank) -> None:
    """A collective is done when all launched it, a send when it is received; launching itself never waits."""
    nccl, comm, me = rank.nccl, rank.world(), rank.rank
    last = rank.nranks - 1
    for name in ("ncclAllReduce", "ncclBroadcast", "ncclSend"):
        buffer = Buffer(FLOAT32, COUNT, rank.inputs(FLOAT32, COUNT))
        rank.all_reached(f"{name}-begin")
        if me == last:
            rank.hear_all_but(last, f"{name}-launched")
        if name == "ncclAllReduce":
            nccl.ncclAllReduce(buffer.address, buffer.address, COUNT, FLOAT32.number, Operator.MAX, comm, 0)
        elif name == "ncclBroadcast":
            nccl.ncclBroadcast(buffer.address, buffer.address, COUNT, FLOAT32.number, 0, comm, 0)
        elif me == 0:
            nccl.ncclSend(buffer.address, COUNT, FLOAT32.number, last, comm, 0)
        elif me == last:
            nccl.ncclRecv(buffer.address, COUNT, FLOAT32.number, 0, comm, 0)
        if me != last:
            assert rank.busy() or (name == "ncclSend" and me)
            rank.tell(f"{name}-launched-{me}")
        rank.synchronize()
        assert not rank.busy()
    nccl.ncclCommDestroy(comm)


def streams(rank: Rank) -> None:
    """One stream keeps its order over two communicators: the second sum uses the result of the first."""
    nccl, first, second, n = rank.nccl, rank.world(), rank.world("second"), rank.nranks
    shared, free = 0x1000, 0x2000
    a, b, c = Buffer(INT32, 1, [1]), Buffer(INT32, 1, [10]), Buffer(INT32, 1, [1])
    # All but rank 0 put both sums on one stream. Rank 0 launches the second one first, on another stream.
    if rank.rank:
        nccl.ncclAllReduce(a.address, a.address, 1, INT32.number, Operator.SUM, first, shared)
    nccl.ncclAllReduce(a.address, a.address, 1, INT32.number, Operator.SUM, second, shared if rank.rank else free)
    nccl.ncclAllReduce(b.address, b.address, 1, INT32.number, Operator.SUM, second, free)
    assert rank.busy(free)
    rank.tell(f"launched-{rank.rank}")
    if rank.rank == 0:
        rank.hear_all_but(0, "launched")
        assert rank.busy(free)
        nccl.ncclAllReduce(c.address, c.address, 1, INT32.number, Operator.SUM, first, shared)
        rank.synchronize(shared)
        assert c.values == [n]
    rank.synchronize(free)
    rank.synchronize(shared)
    assert a.values == [1 + n * (n - 1)]
    assert b.values == [10 * n]
    nccl.ncclCommDestroy(first)
    nccl.ncclCommDestroy(second)


def groups(rank: Rank) -> None:
    """An error inside a group fails the whole group; a simulated group launches nothing."""
    nccl, comm = rank.nccl, rank.world()
    buffer = Buffer(INT32, 1, [5])
    good = (nccl.ncclAllReduce, buffer.address, buffer.address, 1, INT32.number, Operator.SUM, comm, 0)
    bad = (nccl.ncclBroadcast, buffer.address, buffer.address, 1, INT32.number, 99, comm, 0)
    assert nccl.result_of(nccl.ncclGroupEnd) is Result.INVALID_USAGE
    nccl.ncclGroupStart()
    assert nccl.result_of(*good) is Result.SUCCESS
    assert nccl.result_of(*bad) is Result.INVALID_ARGUMENT
    assert nccl.result_of(nccl.ncclGroupEnd) is Result.INVALID_ARGUMENT
    assert not rank.busy()

    info = SimInfo(ctypes.sizeof(SimInfo), SIM_INFO_MAGIC, 22809, -1.0)
    nccl.ncclGroupStart()
    nccl.result_of(*good)
    nccl.ncclGroupSimulateEnd(ctypes.byref(info))
    assert info.estimatedTime == 0.0
    assert not rank.busy()

    # Many collectives and messages of two communicators in one group, and another group after it.
    other = rank.world("other")
    sums = [Buffer(INT32, 1, [i]) for i in range(6)]
    there, back = Buffer(INT32, 1, [rank.rank]), Buffer(INT32, 1)
    n = rank.nranks
    nccl.ncclGroupStart()
    nccl.ncclSend(there.address, 1, INT32.number, (rank.rank + 1) % n, other, 0)
    for i, one in enumerate(sums):
        nccl.ncclAllReduce(one.address, one.address, 1, INT32.number, Operator.SUM, (comm, other)[i % 2], 0)
    nccl.ncclRecv(back.address, 1, INT32.number, (rank.rank - 1) % n, other, 0)
    nccl.ncclGroupEnd()
    rank.synchronize()
    assert [one.values for one in sums] == [[i * n] for i in range(6)]
    assert back.values == [(rank.rank - 1) % n]

    patient = rank.world("patient", config(blocking=False))
    rank.settle(patient)
    nccl.ncclGroupStart()
    assert nccl.result_of(*good) is Result.SUCCESS
    mixed = nccl.result_of(nccl.ncclAllReduce, buffer.address, buffer.address, 1, 2, 0, patient, 0)
    assert mixed is Result.INVALID_ARGUMENT
    assert nccl.result_of(nccl.ncclGroupEnd) is Result.INVALID_ARGUMENT
    for one_comm in (patient, other, comm):
        nccl.ncclCommDestroy(one_comm)
    assert nccl.result_of(nccl.ncclCommDestroy, comm) is Result.INVALID_ARGUMENT
    assert nccl.result_of(*good) is Result.INVALID_ARGUMENT


def mismatch(rank: Rank) -> None:
    """Ranks that launch different operations get an asynchronous error that names both."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    out = Buffer(FLOAT64, 64)
    for number, what in enumerate(("count", "type", "operator", "operation", "length of a message")):
        comm = rank.world(f"id-{number}")
        odd = me == n - 1
        if what == "operation" and odd:
            nccl.ncclBroadcast(out.address, out.address, 2, FLOAT32.number, 0, comm, 0)
        elif what == "length of a message" and me == 0:
            nccl.ncclSend(out.address, 2, FLOAT32.number, n - 1, comm, 0)
        elif what == "length of a message" and odd:
            nccl.ncclRecv(out.address, 3, FLOAT32.number, 0, comm, 0)
        elif what != "length of a message":
            count = 3 if what == "count" and odd else 2
            datatype = INT32 if what == "type" and odd else FLOAT32
            operator = Operator.MAX if what == "operator" and odd else Operator.SUM
            nccl.ncclAllReduce(out.address, out.address, count, datatype.number, operator, comm, 0)
        if what != "length of a message" or me == 0 or odd:
            # A rank in between may see the end of one that saw the mismatch first.
            assert rank.settle_in_error(comm) in (Result.INVALID_USAGE, Result.REMOTE_ERROR), what
        if odd:
            assert "where this rank runs" in nccl.last_error(comm), what
        rank.all_reached(f"seen-{number}")
        nccl.ncclCommAbort(comm)
