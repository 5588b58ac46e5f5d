"""Runs a job of NCCL calls only, on the fake NCCL: collectives, splits, sends and receives in groups.

    nccl_steps.py --meeting FOLDER --rank R --ranks N [--shape world|pairs|square|grid|brief] [--steps S] [--pace-s P]
                  [--device-mib M]

Ranks exchange a unique id through a file in FOLDER; afterwards they communicate through NCCL only. The state of a rank
is a vector of 64-bit numbers. Every operation mixes what it received into it. Each step ends with a line that has a
digest of the state, so it depends on every number that ever arrived.

Shapes: `world` is one communicator; `pairs` adds a split by parity, a ring in groups and a communicator that exists for
one step; `square` is tensor × data parallel for 4 ranks, and `grid` tensor × pipeline × data parallel for 8, with the
data-parallel sum launched by a second thread, as autograd does; `brief`, for one rank, destroys its only communicator before
the first step. The functions are looked up in the global scope, as in a linked program, so that a preloaded library comes
first.

With --device-mib NCCL reads and writes device memory, in a buffer registered with the first communicator, and every
step changes device memory and reads all of it. While the file FOLDER/slow-R-NODE exists, rank R is slow on that node.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import queue
import sys
import threading
import time
from array import array
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

from nccl_memory import WORDS, Device, DeviceWords, Words

UINT64, SUM, MAX = 5, 0, 2
ID_BYTES = 128
MASK = (1 << 64) - 1
SLOW_S = 0.4


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


def load() -> ctypes.CDLL:
    ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
    made = ctypes.CDLL(None)
    words, comm, stream = c_void_p, c_void_p, c_void_p
    made.ncclCommInitRank.argtypes = (ctypes.POINTER(comm), c_int, UniqueId, c_int)
    made.ncclCommSplit.argtypes = (comm, c_int, c_int, ctypes.POINTER(comm), c_void_p)
    made.ncclCommDestroy.argtypes = (comm,)
    made.ncclCommRegister.argtypes = (comm, words, c_size_t, ctypes.POINTER(words))
    made.ncclAllReduce.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclReduceScatter.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclAllGather.argtypes = (words, words, c_size_t, c_int, comm, stream)
    made.ncclBroadcast.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclSend.argtypes = (words, c_size_t, c_int, c_int, comm, stream)
    made.ncclRecv.argtypes = (words, c_size_t, c_int, c_int, comm, stream)
    made.fakeNcclStreamSynchronize.argtypes = (stream,)
    made.ncclGetLastError.restype, made.ncclGetLastError.argtypes = ctypes.c_char_p, (comm,)
    return made


class Job:
    def __init__(self, options: argparse.Namespace) -> None:
        self.nccl = load()
        self.rank, self.ranks, self.pace_s = options.rank, options.ranks, options.pace_s
        self.meeting = Path(options.meeting)
        self.state = array("Q", (self.rank * 1_000_003 + index * 7919 for index in range(WORDS)))
        self.step, self.watched_step = 0, options.stuck_at
        self.device = Device(options.device_mib, self.rank) if options.device_mib else None
        self.everybody = c_void_p()

    def ask(self, name: str, *arguments: object) -> None:
        result = getattr(self.nccl, name)(*arguments)
        if result != 0:
            said = f"WRONG {name} answers {result}: {self.nccl.ncclGetLastError(None)!r}"
            print(said, file=sys.stderr, flush=True)
            os._exit(1)

    def mix(self, received: Words) -> None:
        for index, value in enumerate(received.read()):
            at = index % WORDS
            self.state[at] = (self.state[at] * 6364136223846793005 + value + 1442695040888963407) & MASK

    def words(self, count: int = WORDS, values: array[int] | None = None) -> Words:
        return DeviceWords(self.device, count, values) if self.device is not None else Words(count, values)

    def pause(self) -> None:
        if self.pace_s:
            time.sleep(self.pace_s)
        if (self.meeting / f"slow-{self.rank}-{os.uname().nodename}").exists():  # only while the rank is on that node
            time.sleep(SLOW_S)

    # ------------------------------------------------------------ communicators

    def world(self) -> c_void_p:
        path, made = self.meeting / "id", UniqueId()
        if self.rank == 0:
            self.ask("ncclGetUniqueId", ctypes.byref(made))
            fresh = path.with_suffix(".new")
            fresh.write_bytes(ctypes.string_at(ctypes.addressof(made), ID_BYTES))
            fresh.rename(path)
        while not path.exists():
            time.sleep(0.005)
        made = UniqueId.from_buffer_copy(path.read_bytes())
        comm = c_void_p()
        self.ask("ncclCommInitRank", ctypes.byref(comm), self.ranks, made, self.rank)
        if self.device is not None:
            block, registered = c_void_p(self.device.blocks[0]), c_void_p()
            self.ask("ncclCommRegister", comm, block, self.device.block_bytes, ctypes.byref(registered))
        self.everybody = comm
        return comm

    def agree_to_end(self) -> bool:
        """Whether any rank has seen FOLDER/end. All ranks get the same answer, so all end after the same step."""
        if self.everybody.value is None:
            return (self.meeting / "end").exists()
        seen = self.words(1, array("Q", [(self.meeting / "end").exists()]))
        self.ask("ncclAllReduce", seen.address, seen.address, 1, UINT64, MAX, self.everybody, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return bool(seen.read()[0])

    def split(self, comm: c_void_p, color: int) -> c_void_p:
        child = c_void_p()
        self.ask("ncclCommSplit", comm, color, self.rank, ctypes.byref(child), None)
        return child

    # ------------------------------------------------------------ operations; each waits until its work is complete

    def all_reduce(self, comm: c_void_p, operator: int = SUM, stream: int = 0) -> Words:
        sent, received = self.words(values=self.state), self.words()
        self.ask("ncclAllReduce", sent.address, received.address, WORDS, UINT64, operator, comm, stream)
        if self.step == self.watched_step:
            (self.meeting / f"launched-{self.rank}").touch()
        self.ask("fakeNcclStreamSynchronize", stream)
        return received

    def broadcast(self, comm: c_void_p, root: int) -> Words:
        words = self.words(values=self.state)
        self.ask("ncclBroadcast", words.address, words.address, WORDS, UINT64, root, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return words

    def gather(self, comm: c_void_p, members: int) -> Words:
        mine, received = self.words(values=self.state[:4]), self.words(4 * members)
        self.ask("ncclAllGather", mine.address, received.address, 4, UINT64, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return received

    def ring(self, comm: c_void_p, me: int, members: int) -> Words:
        """Sends to the next member and receives from the previous one, in one group with a collective."""
        sent, received, total = self.words(values=self.state), self.words(), self.words()
        self.ask("ncclGroupStart")
        self.ask("ncclSend", sent.address, WORDS, UINT64, (me + 1) % members, comm, 0)
        self.ask("ncclRecv", received.address, WORDS, UINT64, (me - 1) % members, comm, 0)
        self.ask("ncclAllReduce", sent.address, total.address, WORDS, UINT64, MAX, comm, 0)
        self.ask("ncclGroupEnd")
        self.ask("fakeNcclStreamSynchronize", 0)
        self.mix(total)
        return received

    def send(self, comm: c_void_p, to: int) -> None:
        words = self.words(values=self.state)
        self.ask("ncclSend", words.address, WORDS, UINT64, to, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)

    def receive(self, comm: c_void_p, of: int) -> Words:
        words = self.words()
        self.ask("ncclRecv", words.address, WORDS, UINT64, of, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return words


def world(job: Job) -> Callable[[], None]:
    comm = job.world()

    def step() -> None:
        job.mix(job.all_reduce(comm))
        job.pause()
        job.mix(job.broadcast(comm, job.step % job.ranks))
        job.mix(job.gather(comm, job.ranks))

    return step


def pairs(job: Job) -> Callable[[], None]:
    comm = job.world()
    half = job.split(comm, job.rank % 2)
    members = (job.ranks + 1 - job.rank % 2) // 2

    def step() -> None:
        job.mix(job.all_reduce(half))
        job.pause()
        job.mix(job.ring(comm, job.rank, job.ranks))
        if job.step % 3 == 0:  # exists for one step
            short = job.split(comm, job.rank // 2)
            job.mix(job.all_reduce(short))
            job.ask("ncclCommDestroy", short)
        job.pause()
        if members > 1:
            job.mix(job.ring(half, job.rank // 2, members))
        job.mix(job.all_reduce(comm))

    return step


class Gradients:
    """Their sums, which a second thread launches."""

    def __init__(self, job: Job, comm: c_void_p) -> None:
        self._job, self._comm = job, comm
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._summed: queue.SimpleQueue[Words] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._asked.get()
            self._summed.put(self._job.all_reduce(self._comm, stream=0x2000))

    def sum(self) -> Words:
        self._asked.put(None)
        return self._summed.get()


def square(job: Job) -> Callable[[], None]:
    """2 × 2: rank = 2 · data + tensor."""
    comm = job.world()
    tensor = job.split(comm, job.rank // 2)
    gradients = Gradients(job, job.split(comm, job.rank % 2))

    def step() -> None:
        job.mix(job.all_reduce(tensor))
        job.pause()
        job.mix(job.all_reduce(tensor, MAX))
        job.mix(gradients.sum())

    return step


def grid(job: Job) -> Callable[[], None]:
    """2 × 2 × 2: rank = 4 · data + 2 · stage + tensor."""
    comm = job.world()
    part, stage, replica = job.rank % 2, job.rank // 2 % 2, job.rank // 4
    tensor = job.split(comm, job.rank // 2)
    pipeline = job.split(comm, 2 * replica + part)
    gradients = Gradients(job, job.split(comm, job.rank % 4))

    def step() -> None:
        for _ in range(2):  # micro-batches: forward, then back
            if stage == 1:
                job.mix(job.receive(pipeline, 0))
            job.mix(job.all_reduce(tensor))
            job.pause()
            if stage == 0:
                job.send(pipeline, 1)
                job.mix(job.receive(pipeline, 1))
            else:
                job.send(pipeline, 0)
            job.mix(job.all_reduce(tensor, MAX))
        job.mix(gradients.sum())
        if job.step % 4 == 0:
            job.mix(job.all_reduce(comm))

    return step


def brief(job: Job) -> Callable[[], None]:
    comm = job.world()
    job.mix(job.all_reduce(comm))
    job.ask("ncclCommDestroy", comm)
    job.everybody = c_void_p()

    def step() -> None:
        job.mix(job.words(values=job.state))
        job.pause()

    return step


SHAPES = {"world": world, "pairs": pairs, "square": square, "grid": grid, "brief": brief}


def open_beside_nccl(options: argparse.Namespace) -> None:
    asked = Path(options.meeting) / f"beside-{options.rank}"
    while not asked.exists():
        time.sleep(0.02)
    assert ctypes.CDLL(options.beside).foreign_open() == 0
    asked.with_name(f"{asked.name}-opened").touch()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meeting", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="world")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace-s", type=float, default=0.02)
    parser.add_argument("--stuck-at", type=int, default=-1, help="a step in which --stuck waits until FOLDER/go exists")
    parser.add_argument("--stuck", action="store_true", help="the others write FOLDER/launched-R when they wait for it")
    parser.add_argument("--device-mib", type=int, default=0)
    parser.add_argument("--beside", default="", help="a library that opens an RDMA device when FOLDER/beside-R exists")
    parser.add_argument("--witness", default=os.devnull, help="every line is appended to this file, opened by name")
    options = parser.parse_args()
    if options.beside:
        threading.Thread(target=open_beside_nccl, args=(options,), daemon=True).start()
    job = Job(options)
    step = SHAPES[options.shape](job)
    for job.step in range(options.steps):
        if options.stuck and job.step == options.stuck_at:
            while not (job.meeting / "go").exists():
                time.sleep(0.01)
        step()
        on_device = job.device.turn(job.step, job.state.tobytes()) if job.device is not None else b""
        line = f"{job.step} {hashlib.sha256(job.state.tobytes() + on_device).hexdigest()[:24]}"
        with open(options.witness, "a") as witness:
            witness.write(f"{line}\n")
        print(line, flush=True)
        if job.agree_to_end():
            break
    print("DONE", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
