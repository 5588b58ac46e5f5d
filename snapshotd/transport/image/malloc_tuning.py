"""What the C library does with freed chunks. It decides a tenth of the lane's speed.

By default glibc gives every block of some megabytes back to the kernel when it is freed, and the next chunk pays for
fresh zeroed pages again. While images travel, freed blocks stay with the process; afterwards they all go back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT_BYTES = 64 << 20
_DEFAULT_TRIM_BYTES = 128 << 10

_users = 0


@contextmanager
def freed_blocks_kept() -> Iterator[None]:
    """While any caller is inside, blocks are reused; the last one out gives back what is free. On the loop's thread."""
    global _users
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library, with another way
        yield
        return
    _users += 1
    if _users == 1:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most glibc allows
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            libc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_BYTES)
            libc.malloc_trim(0)
