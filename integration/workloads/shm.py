"""Uses named POSIX shared memory, written by the parent and summed by a child."""

import multiprocessing
from multiprocessing import shared_memory

from steps import say, steps, wrong

context = multiprocessing.get_context("fork")


def content(of: shared_memory.SharedMemory) -> memoryview:
    assert of.buf is not None
    return of.buf


segment = shared_memory.SharedMemory(create=True, size=4 << 20)
asked, answered = context.Queue(), context.Queue()


def child() -> None:
    view = shared_memory.SharedMemory(name=segment.name)
    while (step := asked.get()) is not None:
        answered.put(sum(content(view)[: step + 1]))
    view.close()


worker = context.Process(target=child, daemon=True)
worker.start()
for step in steps():
    content(segment)[step] = (step * 7 + 1) % 251
    asked.put(step)
    total = answered.get(timeout=60)
    if total != sum((number * 7 + 1) % 251 for number in range(step + 1)):
        wrong(f"the child sees {total}")
    again = shared_memory.SharedMemory(name=segment.name)  # the name still refers to it
    if content(again)[step] != content(segment)[step]:
        wrong("the name leads elsewhere")
    again.close()
    say(step, total)
asked.put(None)
worker.join()
segment.close()
segment.unlink()
