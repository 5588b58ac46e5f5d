"""Keeps the daemon's memory small: what a move needed goes back to the kernel once the move is over.

The C library keeps freed memory for later, in a heap for each thread that ever allocated. After some moves a daemon would
have several times the memory that it uses, on a node whose memory belongs to the job. Python, for its part, looks for
unused objects that refer to each other only when their number is a quarter of all objects.
"""

from __future__ import annotations

import ctypes
import gc

from snapshotd.runtime.blocking import in_thread

_M_ARENA_MAX = -8  # malloc.h
_ARENAS = 2

_libc = ctypes.CDLL(None)


def share() -> None:
    """Lets all threads share two heaps. To be called before threads are started. Without effect on other C libraries."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def keep() -> None:
    """What exists now stays as long as the process: `give_back` does not look at it. To be called once, after the start."""
    gc.collect()
    gc.freeze()


async def give_back() -> None:
    """Frees what is unused, and returns freed memory to the kernel."""
    gc.collect()  # on the event loop, to which some of it may belong; takes milliseconds after `keep`
    await in_thread(_trim)


def _trim() -> None:
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
