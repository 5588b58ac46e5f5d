"""Runs two processes that share tensors on a GPU through torch.multiprocessing (CUDA IPC).

Prints what each has read from the other's memory, then `READY`. When the file --until exists both change what they share once
more, print what they find, and end.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

ELEMENTS = 4 << 20


def other(inbox: Any, outbox: Any) -> None:
    given = inbox.get()
    outbox.put(("the child finds", int(given.sum().item())))
    given.add_(1)
    torch.cuda.synchronize()
    own = torch.full((ELEMENTS,), 5, dtype=torch.int32, device="cuda")
    outbox.put(own)
    inbox.get()
    outbox.put(("the child finds in its own", int(own.sum().item())))
    outbox.put(("the child finds at last", int(given.sum().item())))
    given.sub_(4)
    own.add_(1)
    torch.cuda.synchronize()
    outbox.put(None)
    inbox.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=Path, required=True)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=other, args=(inbox, outbox))
    child.start()
    mine = torch.arange(ELEMENTS, dtype=torch.int32, device="cuda") % 7
    inbox.put(mine)
    print(*outbox.get(), flush=True)
    theirs = outbox.get()
    print("the parent finds in its own", int(mine.sum().item()), flush=True)
    print("the parent finds", int(theirs.sum().item()), flush=True)
    theirs.mul_(3)
    torch.cuda.synchronize()
    print("READY", flush=True)
    while not options.until.exists():
        time.sleep(0.05)
    mine.add_(2)
    torch.cuda.synchronize()
    inbox.put(None)
    print(*outbox.get(), flush=True)
    print(*outbox.get(), flush=True)
    outbox.get()
    print("the parent finds in its own at last", int(mine.sum().item()), flush=True)
    print("the parent finds at last", int(theirs.sum().item()), flush=True)
    del theirs
    inbox.put(None)
    child.join()
    print("DONE", child.exitcode, flush=True)


if __name__ == "__main__":
    main()
