"""A 16-byte digest of a file's content, to recognise equal files whose times differ.

Files up to WHOLE_BYTES are read completely. Larger ones are sampled at evenly spaced places, which distinguishes two
builds of one library at a bounded cost. Both nodes use the same rule, so digests of the same size can be compared.
Digests are cached by (device, inode, mtime, size): a daemon reads each library once.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable

import xxhash

WHOLE_BYTES = 256 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
CACHED = 8192
_BLOCKS_AT_ONCE = 8

_known: OrderedDict[tuple[int, int, int, int], bytes] = OrderedDict()


def content_digest(handle: int, size: int, deadline: float = float("inf")) -> bytes:
    """xxh3-128 of the first `size` bytes; empty if the file is shorter or `deadline` (monotonic) has passed.

    `handle` is open for reading; its position does not change. Only a prefix is compared, because a log that other
    processes append to is still the same file up to `size`.
    """
    stat = os.fstat(handle)

    def read(offsets: list[int], count: int) -> bytes:
        return b"".join(os.pread(handle, count, offset) for offset in offsets)

    return digest_of((stat.st_dev, stat.st_ino, stat.st_mtime_ns, size), size, read, deadline)


def digest_of(
    key: tuple[int, int, int, int], size: int, read: Callable[[list[int], int], bytes], deadline: float = float("inf")
) -> bytes:
    """The same for a file that `read` reads: so many bytes at each of some offsets. `key` has device, inode and time."""
    if (cached := _known.get(key)) is not None:
        return cached
    state = xxhash.xxh3_128(size.to_bytes(8, "little"))
    offsets = _offsets(size)
    for at in range(0, len(offsets), _BLOCKS_AT_ONCE):
        if time.monotonic() > deadline:
            return b""
        some = offsets[at : at + _BLOCKS_AT_ONCE]
        wanted = sum(min(BLOCK_BYTES, size - offset) for offset in some)
        content = read(some, BLOCK_BYTES)[:wanted]
        if len(content) < wanted:
            return b""
        state.update(content)
    _known[key] = state.digest()
    while len(_known) > CACHED:
        _known.popitem(last=False)
    return state.digest()


def is_sampled(size: int) -> bool:
    return size > WHOLE_BYTES


def _offsets(size: int) -> list[int]:
    if not is_sampled(size):
        return list(range(0, size, BLOCK_BYTES))
    blocks = WHOLE_BYTES // BLOCK_BYTES
    last = size - BLOCK_BYTES
    return [last * index // (blocks - 1) for index in range(blocks)]
