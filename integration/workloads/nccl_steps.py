"""A job that does nothing but NCCL calls, on the stand-in for NCCL: collectives, splits, sends and receives in groups.

    nccl_steps.py --meeting FOLDER --rank R --ranks N [--shape world|pairs|grid] [--steps S] [--pace-s P]

Ranks agree on a unique id through a file in FOLDER, then NCCL is all that is between them. The state of a rank is a vector
of 64-bit numbers; every operation mixes what it received into it, so the line that a step ends with, a digest of the state,
depends on every number that ever arrived.

Shapes: `world` is one communicator; `pairs` adds a split by parity, a ring in groups and a communicator that lives for one
step; `grid` is tensor × pipeline × data parallel for 8 ranks, with the data-parallel sum launched by a second thread, as
autograd does. The library is the one that the dynamic linker finds, looked up in the global scope as a linked program's
symbols are, so that a preloaded library comes first.
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

UINT64, SUM, MAX = 5, 0, 2
ID_BYTES = 128
WORDS = 64
MASK = (1 << 64) - 1


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


def load() -> ctypes.CDLL:
    ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
    made = ctypes.CDLL(None)
    words, comm, stream = c_void_p, c_void_p, c_void_p
    made.ncclCommInitRank.argtypes = (ctypes.POINTER(comm), c_int, UniqueId, c_int)
    made.ncclCommSplit.argtypes = (comm, c_int, c_int, ctypes.POINTER(comm), c_void_p)
    made.ncclCommDestroy.argtypes = (comm,)
    made.ncclAllReduce.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclReduceScatter.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclAllGather.argtypes = (words, words, c_size_t, c_int, comm, stream)
    made.ncclBroadcast.argtypes = (words, words, c_size_t, c_int, c_int, comm, stream)
    made.ncclSend.argtypes = (words, c_size_t, c_int, c_int, comm, stream)
    made.ncclRecv.argtypes = (words, c_size_t, c_int, c_int, comm, stream)
    made.fakeNcclStreamSynchronize.argtypes = (stream,)
    made.ncclGetLastError.restype, made.ncclGetLastError.argtypes = ctypes.c_char_p, (comm,)
    return made


class Words:
    """A vector that NCCL reads and writes in place."""

    def __init__(self, count: int = WORDS, values: array[int] | None = None) -> None:
        self.values = array("Q", values if values is not None else bytes(8 * count))

    @property
    def address(self) -> c_void_p:
        return c_void_p(self.values.buffer_info()[0])

    def __len__(self) -> int:
        return len(self.values)


class Job:
    def __init__(self, options: argparse.Namespace) -> None:
        self.nccl = load()
        self.rank, self.ranks, self.pace_s = options.rank, options.ranks, options.pace_s
        self.meeting = Path(options.meeting)
        self.state = array("Q", (self.rank * 1_000_003 + index * 7919 for index in range(WORDS)))
        self.step, self.watched_step = 0, options.stuck_at

    def ask(self, name: str, *arguments: object) -> None:
        result = getattr(self.nccl, name)(*arguments)
        if result != 0:
            print(f"WRONG {name} answers {result}: {self.nccl.ncclGetLastError(None)!r}", flush=True)
            os._exit(1)

    def mix(self, received: Words) -> None:
        for index, value in enumerate(received.values):
            at = index % WORDS
            self.state[at] = (self.state[at] * 6364136223846793005 + value + 1442695040888963407) & MASK

    def pause(self) -> None:
        if self.pace_s:
            time.sleep(self.pace_s)

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
        return comm

    def split(self, comm: c_void_p, color: int) -> c_void_p:
        child = c_void_p()
        self.ask("ncclCommSplit", comm, color, self.rank, ctypes.byref(child), None)
        return child

    # ------------------------------------------------------------ operations; each waits for what it has launched

    def all_reduce(self, comm: c_void_p, operator: int = SUM, stream: int = 0) -> Words:
        sent, received = Words(values=self.state), Words()
        self.ask("ncclAllReduce", sent.address, received.address, WORDS, UINT64, operator, comm, stream)
        if self.step == self.watched_step:
            (self.meeting / f"launched-{self.rank}").touch()
        self.ask("fakeNcclStreamSynchronize", stream)
        return received

    def broadcast(self, comm: c_void_p, root: int) -> Words:
        words = Words(values=self.state)
        self.ask("ncclBroadcast", words.address, words.address, WORDS, UINT64, root, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return words

    def gather(self, comm: c_void_p, members: int) -> Words:
        mine, received = Words(values=self.state[:4]), Words(4 * members)
        self.ask("ncclAllGather", mine.address, received.address, 4, UINT64, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)
        return received

    def ring(self, comm: c_void_p, me: int, members: int) -> Words:
        """To the next member and from the one before, in one group with a collective."""
        sent, received, total = Words(values=self.state), Words(), Words()
        self.ask("ncclGroupStart")
        self.ask("ncclSend", sent.address, WORDS, UINT64, (me + 1) % members, comm, 0)
        self.ask("ncclRecv", received.address, WORDS, UINT64, (me - 1) % members, comm, 0)
        self.ask("ncclAllReduce", sent.address, total.address, WORDS, UINT64, MAX, comm, 0)
        self.ask("ncclGroupEnd")
        self.ask("fakeNcclStreamSynchronize", 0)
        self.mix(total)
        return received

    def send(self, comm: c_void_p, to: int) -> None:
        words = Words(values=self.state)
        self.ask("ncclSend", words.address, WORDS, UINT64, to, comm, 0)
        self.ask("fakeNcclStreamSynchronize", 0)

    def receive(self, comm: c_void_p, of: int) -> Words:
        words = Words()
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
        if job.step % 3 == 0:  # lives for one step
            short = job.split(comm, job.rank // 2)
            job.mix(job.all_reduce(short))
            job.ask("ncclCommDestroy", short)
        job.pause()
        if members > 1:
            job.mix(job.ring(half, job.rank // 2, members))
        job.mix(job.all_reduce(comm))

    return step


def grid(job: Job) -> Callable[[], None]:
    """2 × 2 × 2: rank = 4 · data + 2 · stage + tensor."""
    comm = job.world()
    part, stage, replica = job.rank % 2, job.rank // 2 % 2, job.rank // 4
    tensor = job.split(comm, job.rank // 2)
    pipeline = job.split(comm, 2 * replica + part)
    data = job.split(comm, job.rank % 4)
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    summed: queue.SimpleQueue[Words] = queue.SimpleQueue()

    def reduce_gradients() -> None:
        while True:
            asked.get()
            summed.put(job.all_reduce(data, stream=0x2000))

    threading.Thread(target=reduce_gradients, daemon=True).start()

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
        asked.put(None)
        job.mix(summed.get())
        if job.step % 4 == 0:
            job.mix(job.all_reduce(comm))

    return step


SHAPES = {"world": world, "pairs": pairs, "grid": grid}


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
    options = parser.parse_args()
    job = Job(options)
    step = SHAPES[options.shape](job)
    for job.step in range(options.steps):
        if options.stuck and job.step == options.stuck_at:
            while not (job.meeting / "go").exists():
                time.sleep(0.01)
        step()
        print(f"{job.step} {hashlib.sha256(job.state).hexdigest()[:24]}", flush=True)
    print("DONE", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
