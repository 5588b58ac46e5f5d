"""A `torch` with the part of `torch.cuda` that the safe point needs, and a job that executes lines from stdin."""

import os
import sys
import threading
import time
import types

CALLS: list[str] = []
RESERVED = [300, 500]


def make(initialized: bool = True, capturing: bool = False, failure: BaseException | None = None) -> None:
    def empty_cache() -> None:
        CALLS.append("main" if threading.current_thread() is threading.main_thread() else "other")
        if failure is not None:
            raise failure
        RESERVED[:] = [100, 150]

    def is_current_stream_capturing() -> bool:
        return capturing

    torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    functions = {
        "is_initialized": lambda: initialized,
        "is_current_stream_capturing": is_current_stream_capturing,
        "device_count": lambda: len(RESERVED),
        "memory_reserved": lambda device: RESERVED[device],
        "empty_cache": empty_cache,
    }
    vars(cuda).update(functions)
    vars(torch)["cuda"] = cuda
    sys.modules["torch"] = torch


class Pool:
    """Of compilers, as torch's SubprocPool."""

    def __init__(self, failure: BaseException | None = None, timer: bool = True, pending: int = 0) -> None:
        self.write_lock, self.failure = threading.Lock(), failure
        self.timer = object() if timer else None
        self.pending_futures = dict.fromkeys(range(pending))

    def quiesce(self) -> None:
        with self.write_lock:
            CALLS.append("quiesce")
        if self.failure is not None:
            raise self.failure


def make_pools(*pools: object) -> None:
    compiling = types.ModuleType("torch._inductor.async_compile")
    vars(compiling)["_pool_set"] = {*pools}
    sys.modules[compiling.__name__] = compiling


def busy_until_told() -> None:
    """Runs only bytecode: nothing here releases the interpreter's lock."""
    received: list[str] = []
    threading.Thread(target=lambda: received.append(sys.stdin.readline()), daemon=True).start()
    say("busy")
    while not received:
        pass


def say(word: object) -> None:
    print(word, flush=True)


def listen() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    say("ready")
    while line := sys.stdin.readline():
        words = line.split()
        if words[0] == "end":
            return
        exec(line, {**globals(), "os": os})  # what a test writes


if __name__ == "__main__":
    listen()
