"""Keeps the daemon's memory small: what a move needed goes back to the kernel once the move is over.

The C library keeps freed memory for later, in a heap for each thread that ever allocated. After some moves a daemon would
have several times the memory that it uses, on a node whose memory belongs to the job.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # malloc.h
_ARENAS = 2

_libc = ctypes.CDLL(None)


def share() -> None:
    """Lets all threads share two heaps. To be called before threads are started. Without effect on other C libraries."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Returns freed memory to the kernel. Takes milliseconds: not for the event loop."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
