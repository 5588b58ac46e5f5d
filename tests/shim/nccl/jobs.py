"""Jobs that run while a test detaches and rebuilds their communicators. They check every result in every step.

A job runs until the file `stop` exists in the meeting folder. The first rank reads it and informs the others by a
broadcast, as a training script would, so that all end after the same step.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from ctypes import c_int, c_void_p

from tests.fakes.nccl_calls import Nccl, NcclFailed, Operator, Result, config
from tests.fakes.nccl_numbers import INT32, INT64
from tests.fakes.nccl_rank import Buffer, Rank, joined

COUNT = 33


def _stops(rank: Rank, comm: c_void_p) -> bool:
    flag = Buffer(INT32, 1, [int((rank.meeting / "stop").exists())])
    rank.nccl.ncclBroadcast(flag.address, flag.address, 1, INT32.number, 0, comm, 0)
    rank.synchronize()
    return bool(flag.values[0])


def _sum(rank: Rank, comm: c_void_p, members: list[int], step: int, stream: int = 0) -> None:
    send, receive = Buffer(INT64, COUNT, [rank.rank * 1000 + step + i for i in range(COUNT)]), Buffer(INT64, COUNT)
    rank.nccl.ncclAllReduce(send.address, receive.address, COUNT, INT64.number, Operator.SUM, comm, stream)
    rank.synchronize(stream)
    assert receive.values == [sum(member * 1000 + step + i for member in members) for i in range(COUNT)]


def _ring(rank: Rank, comm: c_void_p, members: list[int], step: int) -> None:
    """Sends to the next rank and receives from the previous one, in one group with an all-gather."""
    n, me = len(members), members.index(rank.rank)
    there, back = Buffer(INT32, 1, [rank.rank * 7 + step]), Buffer(INT32, 1)
    mine, all_of_it = Buffer(INT32, 1, [rank.rank + step]), Buffer(INT32, n)
    rank.nccl.ncclGroupStart()
    rank.nccl.ncclSend(there.address, 1, INT32.number, (me + 1) % n, comm, 0)
    rank.nccl.ncclAllGather(mine.address, all_of_it.address, 1, INT32.number, comm, 0)
    rank.nccl.ncclRecv(back.address, 1, INT32.number, (me - 1) % n, comm, 0)
    rank.nccl.ncclGroupEnd()
    rank.synchronize()
    assert back.values == [members[(me - 1) % n] * 7 + step]
    assert all_of_it.values == [member + step for member in members]


def _scaled(rank: Rank, comm: c_void_p, members: list[int], step: int, op: int) -> None:
    send, receive = Buffer(INT64, 1, [rank.rank + step]), Buffer(INT64, 1)
    rank.nccl.ncclAllReduce(send.address, receive.address, 1, INT64.number, op, comm, 0)
    rank.synchronize()
    assert receive.values == [sum(3 * (member + step) for member in members)]


def _tell_step(rank: Rank, step: int) -> None:
    (rank.meeting / f"step-{rank.rank}").write_text(str(step))


def grid(rank: Rank) -> None:
    """Tensor x data parallel: the world, rows and columns of a grid, rings within rows, a kept and a short-lived scale."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    width = min(n, 2)
    world, everybody = rank.world(), list(range(n))
    row, row_members = nccl.split(world, me // width, me), [r for r in everybody if r // width == me // width]
    column, column_members = nccl.split(world, me % width, me), [r for r in everybody if r % width == me % width]
    scalar, op = ctypes.c_int64(3), c_int()
    nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.byref(scalar), INT64.number, 1, world)
    scalar.value = 99  # NCCL has copied the value
    kept, handle = Buffer(INT32, 64), c_void_p()
    nccl.ncclCommRegister(world, kept.address, 256, ctypes.byref(handle))
    step = 0
    while not _stops(rank, world):
        step += 1
        _sum(rank, row, row_members, step)
        if len(row_members) > 1:
            _ring(rank, row, row_members, step)
        _sum(rank, column, column_members, step)
        _scaled(rank, world, everybody, step, op.value)
        _tell_step(rank, step)
    nccl.ncclCommDeregister(world, handle)
    nccl.ncclRedOpDestroy(op, world)
    for comm in (column, row, world):
        assert nccl.ask("ncclCommUserRank", comm) >= 0
        nccl.ncclCommDestroy(comm)


def two_threads(rank: Rank) -> None:
    """A second thread reduces on its own communicator while the main one waits for it in every other step."""
    nccl, everybody = rank.nccl, list(range(rank.nranks))
    world, other = rank.world(), rank.world("other")
    asked, done, ends = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    failures: list[AssertionError | NcclFailed] = []

    def reduce() -> None:
        try:
            step = 0
            while asked.acquire() and not ends.is_set():
                step += 1
                _sum(rank, other, everybody, step, stream=0x2000)
                done.release()
        except (AssertionError, NcclFailed) as failure:
            failures.append(failure)
            done.release()

    thread = threading.Thread(target=reduce)
    thread.start()
    step = 0
    while not _stops(rank, world):
        step += 1
        asked.release()
        if step % 2:
            done.acquire()
        _sum(rank, world, everybody, step)
        if not step % 2:
            done.acquire()
        assert not failures, failures
        _tell_step(rank, step)
    ends.set()
    asked.release()
    thread.join()
    for comm in (other, world):
        nccl.ncclCommDestroy(comm)


def patient(rank: Rank) -> None:
    """Non-blocking communicators: polls for the completion of every call, as torch does."""
    nccl, everybody = rank.nccl, list(range(rank.nranks))
    world = rank.world(settings=config(blocking=False, name="patient"))
    rank.settle(world)
    step = 0
    stop = False
    while not stop:
        step += 1
        send, receive = Buffer(INT64, 1, [rank.rank + step]), Buffer(INT64, 1)
        flag = Buffer(INT32, 1, [int((rank.meeting / "stop").exists())])
        nccl.result_of(nccl.ncclAllReduce, send.address, receive.address, 1, INT64.number, Operator.SUM, world, 0)
        rank.settle(world)
        nccl.result_of(nccl.ncclBroadcast, flag.address, flag.address, 1, INT32.number, 0, world, 0)
        rank.settle(world)
        rank.synchronize()
        assert receive.values == [sum(everybody) + step * rank.nranks]
        stop = bool(flag.values[0])
        _tell_step(rank, step)
    nccl.result_of(nccl.ncclCommFinalize, world)
    rank.settle(world)
    nccl.ncclCommDestroy(world)


def makes_and_ends(rank: Rank) -> None:
    """Creates and destroys communicators in every step: the cut may fall between, or before a creation."""
    nccl, everybody = rank.nccl, list(range(rank.nranks))
    world = rank.world()
    step = 0
    while not _stops(rank, world):
        step += 1
        half = nccl.split(world, rank.rank % 2, rank.rank)
        _sum(rank, half, [r for r in everybody if r % 2 == rank.rank % 2], step)
        nccl.ncclCommDestroy(half)
        _sum(rank, world, everybody, step)
        _tell_step(rank, step)
    nccl.ncclCommDestroy(world)


def ends_one_behind_the_gate(rank: Rank) -> None:
    """The first rank destroys a communicator when it is told to, also while the gate is closed; the other ones at the end."""
    nccl, everybody = rank.nccl, list(range(rank.nranks))
    world, other = rank.world(), rank.world("other")

    def destroy() -> None:
        while rank.rank or not (rank.meeting / "destroy").exists():
            if (rank.meeting / "stop").exists():
                break
            time.sleep(0.005)
        nccl.ncclCommDestroy(other)

    thread = threading.Thread(target=destroy)
    thread.start()
    step = 0
    while not _stops(rank, world):
        step += 1
        _sum(rank, world, everybody, step)
        _tell_step(rank, step)
    joined(thread)
    nccl.ncclCommDestroy(world)


def all_in_one(rank: Rank) -> None:
    """One process drives all devices."""
    nccl, n = rank.nccl, 3
    comms = (c_void_p * n)()
    nccl.ncclCommInitAll(comms, n, None)
    step = 0
    while not (rank.meeting / "stop").exists():
        step += 1
        buffers = [Buffer(INT64, 1, [step * (i + 1)]) for i in range(n)]
        nccl.ncclGroupStart()
        for i, buffer in enumerate(buffers):
            nccl.ncclAllReduce(
                buffer.address, buffer.address, 1, INT64.number, Operator.SUM, comms[i], 0x1000 * (i + 1)
            )
        nccl.ncclGroupEnd()
        for i, buffer in enumerate(buffers):
            rank.synchronize(0x1000 * (i + 1))
            assert buffer.values == [step * n * (n + 1) // 2]
        _tell_step(rank, step)
    for i in range(n):
        nccl.ncclCommDestroy(comms[i])


def devices_in_a_group(rank: Rank) -> None:
    """One thread selects a device, creates its member, and so on, all in one group, as nccl-tests does with `-g`."""
    driver, nccl, n = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL), rank.nccl, 3
    assert driver.cuInit(0) == 0
    contexts = [c_void_p() for _ in range(n)]
    for device, context in enumerate(contexts):
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    made, id_ = [c_void_p() for _ in range(n)], nccl.unique_id()
    nccl.ncclGroupStart()
    for i, context in enumerate(contexts):
        assert driver.cuCtxSetCurrent(context) == 0
        nccl.ncclCommInitRank(ctypes.byref(made[i]), n, id_, i)
    nccl.ncclGroupEnd()
    current, found = c_void_p(), c_int(-1)
    assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
    assert current.value == contexts[-1].value
    devices = []
    for comm in made:
        nccl.ncclCommCuDevice(comm, ctypes.byref(found))
        devices.append(found.value)
    assert devices == list(range(n))
    rank.tell("devices")
    rank.hear("seen")
    for comm in made:
        nccl.ncclCommDestroy(comm)


def past_the_shim(rank: Rank) -> None:
    """Looks NCCL's functions up in the library itself, as vLLM's pynccl does."""
    nccl = Nccl(rank.library_path)
    comm = nccl.init_rank(1, nccl.unique_id(), 0)
    rank.tell("made")
    rank.hear("seen")
    nccl.ncclCommDestroy(comm)


def remains(rank: Rank) -> None:
    """A thread of the program has an address of NCCL on its stack, as one that has loaded the library may."""
    address = ctypes.cast(ctypes.CDLL(str(rank.library_path)).ncclGetVersion, ctypes.c_void_p)
    read_end, write_end = os.pipe()
    wait = ctypes.CDLL(os.environ["REMAINS"]).wait_with
    thread = threading.Thread(target=wait, args=(address, read_end))
    thread.start()
    rank.tell("made")
    rank.hear("seen")
    os.write(write_end, b"\n")
    joined(thread)


def watched(rank: Rank) -> None:
    """The grid, with a watchdog that queries the world communicator continuously and must get success at once."""
    nccl, everybody = rank.nccl, list(range(rank.nranks))
    world = rank.world()
    ends, failures, asked = threading.Event(), list[str](), [0]

    def watch() -> None:
        while not ends.wait(0.001):
            state = nccl.async_error(world)
            asked[0] += 1
            (rank.meeting / f"asked-{rank.rank}").write_text(str(asked[0]))
            if state.name != "SUCCESS":
                failures.append(state.name)

    thread = threading.Thread(target=watch)
    thread.start()
    step = 0
    while not _stops(rank, world):
        step += 1
        _sum(rank, world, everybody, step)
        _tell_step(rank, step)
    ends.set()
    thread.join()
    assert not failures, failures
    nccl.ncclCommDestroy(world)


def idle(rank: Rank) -> None:
    """Loads NCCL and does not use it."""
    rank.hear("stop")


def plain(rank: Rank) -> None:
    """Operations that every version supports."""
    everybody = list(range(rank.nranks))
    world = rank.world()
    step = 0
    while not _stops(rank, world):
        step += 1
        _sum(rank, world, everybody, step)
        _ring(rank, world, everybody, step)
        _tell_step(rank, step)
    rank.nccl.ncclCommDestroy(world)


def crowded(rank: Rank) -> None:
    """A rank with as many threads as $CROWD says that wait all the time, as those of data loaders and thread pools do."""
    ends = threading.Event()
    crowd = [threading.Thread(target=ends.wait) for _ in range(int(os.environ["CROWD"]))]
    for thread in crowd:
        thread.start()
    plain(rank)
    ends.set()
    for thread in crowd:
        thread.join()


def busy(rank: Rank) -> None:
    """A thread computes all the time, without the interpreter's lock."""
    ends = threading.Event()

    def compute() -> None:
        data = bytes(1 << 22)
        while not ends.is_set():
            hashlib.sha256(data).digest()

    thread = threading.Thread(target=compute)
    thread.start()
    plain(rank)
    ends.set()
    thread.join()


def asks_too_much(rank: Rank) -> None:
    """NCCL 2.18 behind a shim that knows later versions."""
    nccl, world, buffer = rank.nccl, rank.world(), Buffer(INT32, 4)
    child, handle = c_void_p(), c_void_p()
    missing = (
        (nccl.ncclAlltoAll, buffer.address, buffer.address, 1, INT32.number, world, 0),
        (nccl.ncclCommRegister, world, buffer.address, 16, ctypes.byref(handle)),
        (nccl.ncclCommShrink, world, (c_int * 1)(1), 1, ctypes.byref(child), None, 0),
        (nccl.ncclMemAlloc, ctypes.byref(handle), 16),
        (nccl.ncclDevCommCreate, world, None, None),
    )
    for function, *arguments in missing:
        assert nccl.result_of(function, *arguments) is Result.INVALID_USAGE
        assert nccl.last_error().startswith("this NCCL (2.18.5) has no nccl")
    nccl.ncclGroupStart()
    assert nccl.result_of(*missing[0]) is Result.SUCCESS
    assert nccl.result_of(nccl.ncclGroupEnd) is Result.INVALID_USAGE
    rank.check_sum(world, INT32)
    nccl.ncclCommDestroy(world)


def groups(rank: Rank) -> None:
    """A group is launched at its end: only then are errors reported, redops destroyed and communicators created."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    world, identity = rank.world(), rank.shared_id("inside")
    buffer = Buffer(INT32, 1, [5])
    nccl.ncclGroupStart()
    nccl.ncclAllReduce(buffer.address, buffer.address, 1, INT32.number, Operator.SUM, world, 0)
    nccl.ncclBroadcast(buffer.address, buffer.address, 1, INT32.number, 99, world, 0)
    assert nccl.result_of(nccl.ncclGroupEnd) is Result.INVALID_ARGUMENT
    rank.synchronize()
    assert buffer.values == [5]

    scalar, op, inside = c_int(10), c_int(), c_void_p()
    one, two = Buffer(INT32, 1, [me]), Buffer(INT32, 1, [me])
    nccl.ncclGroupStart()
    nccl.ncclGroupStart()
    nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.byref(scalar), INT32.number, 1, world)
    nccl.ncclAllReduce(one.address, one.address, 1, INT32.number, op.value, world, 0)
    nccl.ncclRedOpDestroy(op, world)
    nccl.ncclGroupEnd()
    nccl.ncclAllReduce(two.address, two.address, 1, INT32.number, Operator.MAX, world, 0)
    assert not rank.busy()
    nccl.ncclGroupEnd()
    rank.synchronize()
    assert (one.values, two.values) == ([10 * sum(range(n))], [n - 1])

    nccl.ncclGroupStart()
    nccl.ncclCommInitRank(ctypes.byref(inside), n, identity, me)
    assert inside.value
    nccl.ncclGroupEnd()
    rank.check_sum(inside, INT32)
    nccl.ncclGroupStart()
    nccl.ncclCommDestroy(inside)
    nccl.ncclGroupEnd()
    assert nccl.result_of(nccl.ncclCommCount, inside, ctypes.byref(op)) is Result.INVALID_ARGUMENT
    nccl.ncclGroupStart()
    nccl.ncclGroupEnd()
    nccl.ncclCommDestroy(world)


def refusable(rank: Rank) -> None:
    """One communicator for each thing that cannot be moved; then waits."""
    nccl, buffer = rank.nccl, Buffer(INT32, 1024)
    made = {name: rank.world(name) for name in ("window", "device", "aborted", "plain")}
    window, device = c_void_p(), ctypes.create_string_buffer(4096)
    nccl.ncclCommWindowRegister(made["window"], buffer.address, 4096, ctypes.byref(window), 0)
    nccl.result_of(nccl.ncclDevCommCreate, made["device"], device, device)
    nccl.ncclCommAbort(made["aborted"])
    unused = nccl.unique_id() if rank.rank == 0 else None
    _tell_step(rank, 1)
    rank.hear("stop")
    assert unused is None or rank.rank == 0


def beside_another_library(rank: Rank) -> None:
    """The first rank also has a library that opens an RDMA device for itself, as UCX does."""
    if rank.rank == 0:
        assert ctypes.CDLL(os.environ["FOREIGN"]).foreign_open() == 0
    grid(rank)


def with_forked_child(rank: Rank) -> None:
    """Forks a child, as a data loader does, when NCCL has its devices open."""
    world = rank.world()
    if (child := os.fork()) == 0:
        (rank.meeting / f"child-{rank.rank}").write_text(str(os.getpid()))
        while not (rank.meeting / "stop").exists():
            time.sleep(0.01)
        os._exit(0)
    step = 0
    while not (rank.meeting / f"child-{rank.rank}").exists():
        time.sleep(0.005)
    while not _stops(rank, world):
        step += 1
        _sum(rank, world, list(range(rank.nranks)), step)
        _tell_step(rank, step)
    os.waitpid(child, 0)
    rank.nccl.ncclCommDestroy(world)
