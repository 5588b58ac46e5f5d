"""Runs two spawned workers, and later a third, that share queues, a lock, a semaphore and an event with their parent.

Spawned processes open semaphores by name. The names must refer to the semaphores that the others already use, and must
still exist when they are removed at the end. Otherwise the resource tracker prints a warning on stderr.
"""

import hashlib
import multiprocessing
import multiprocessing.context
import os
import queue
from dataclasses import dataclass
from typing import Any

from steps import say, steps, wrong

TASKS = 4


@dataclass
class Shared:
    """The objects that the parent creates and every worker gets."""

    tasks: "multiprocessing.Queue[tuple[int, int] | None]"
    results: "multiprocessing.Queue[tuple[int, str]]"
    lock: Any
    places: Any  # a semaphore of one place
    go: Any
    counts: Any  # done so far; in the semaphore now; maximum in the semaphore


def make(context: multiprocessing.context.SpawnContext) -> Shared:
    return Shared(
        tasks=context.Queue(),
        results=context.Queue(2),  # bounded, so that its semaphore blocks
        lock=context.Lock(),
        places=context.Semaphore(1),
        go=context.Event(),
        counts=context.Array("q", 3, lock=False),
    )


def work(shared: Shared) -> None:
    while (task := shared.tasks.get()) is not None:
        shared.go.wait()
        with shared.places:
            shared.counts[1] += 1
            shared.counts[2] = max(shared.counts[2], shared.counts[1])
            answer = hashlib.sha256(repr(task).encode()).hexdigest()[:12]
            shared.counts[1] -= 1
        with shared.lock:
            shared.counts[0] += 1
        shared.results.put((task[1], answer))


def do(shared: Shared, step: int) -> list[str]:
    """Runs one round: no worker answers before `go`, and every task is answered once."""
    for number in range(TASKS):
        shared.tasks.put((step, number))
    if not shared.results.empty():
        wrong("an answer came before its time")
    shared.go.set()
    answers = {}
    try:
        for _ in range(TASKS):
            number, answer = shared.results.get(timeout=60)
            answers[number] = answer
    except queue.Empty:
        wrong(f"no answer in step {step}: the semaphores are not the same ones any more")
    shared.go.clear()
    with shared.lock:
        if list(shared.counts) != [TASKS * (step + 1), 0, 1]:
            wrong(f"counts {list(shared.counts)} in step {step}")
    return [answers[number] for number in range(TASKS)]


def start(context: multiprocessing.context.SpawnContext, shared: Shared) -> multiprocessing.context.SpawnProcess:
    worker = context.Process(target=work, args=(shared,))
    worker.start()
    return worker


def end(shared: Shared, workers: list[multiprocessing.context.SpawnProcess]) -> None:
    for _ in workers:
        shared.tasks.put(None)
    for worker in workers:
        worker.join()
        if worker.exitcode != 0:
            wrong(f"exit code {worker.exitcode}")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    shared = make(context)
    workers = [start(context, shared) for _ in range(2)]
    last = 0
    for last in steps():
        say(last, *do(shared, last))
    for semaphore in (shared.lock, shared.places):
        if not os.path.exists(f"/dev/shm/sem.{semaphore._semlock.name[1:]}"):
            wrong(f"the name {semaphore._semlock.name} is gone")
    end(shared, workers)
    late = start(context, shared)  # opens everything by name
    say(last + 1, *do(shared, last + 1))
    end(shared, [late])


if __name__ == "__main__":
    main()
