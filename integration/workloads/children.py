"""Two forked children that answer over pipes, count in shared memory and take turns with a semaphore."""

import hashlib
import mmap
import multiprocessing
import os
import struct

from steps import say, steps, wrong

shared = mmap.mmap(-1, 1 << 20)
context = multiprocessing.get_context("fork")
turn = context.Semaphore(1)
left_read, left_write = os.pipe()  # holds bytes that stay unread until the end
os.write(left_write, b"still here")


def child(number: int, pipe: "multiprocessing.connection.Connection") -> None:
    state = bytes([number]) * 1000
    while True:
        word = pipe.recv()
        if word is None:
            return
        state = hashlib.sha256(state + word).digest()
        with turn:
            (count,) = struct.unpack_from("Q", shared, 8 * number)
            struct.pack_into("Q", shared, 8 * number, count + 1)
        pipe.send(state)


ends = []
for number in range(2):
    here, there = context.Pipe()
    worker = context.Process(target=child, args=(number, there), daemon=True)
    worker.start()
    ends.append((worker, here))
pids = [worker.pid for worker, _ in ends]
for step in steps():
    answers = []
    for _, pipe in ends:
        pipe.send(str(step).encode())
    for _, pipe in ends:
        answers.append(pipe.recv().hex()[:16])
    counts = struct.unpack_from("QQ", shared)
    if counts != (step + 1, step + 1):
        wrong(f"shared counters {counts}")
    if [worker.pid for worker, _ in ends] != pids or not all(worker.is_alive() for worker, _ in ends):
        wrong("children")
    say(step, *answers)
if os.read(left_read, 100) != b"still here":
    wrong("the pipe's content")
for worker, pipe in ends:
    pipe.send(None)
    worker.join()
    if worker.exitcode != 0:
        wrong(f"exit code {worker.exitcode}")
