"""Which chunks a file consists of: the source's count of what it sent, and the target's of what it stored.

Both ends come to the same `ImageFile` by the same function, or the file is not whole.
"""

from __future__ import annotations

import xxhash

from snapshotd.api.snapshotd_pb2 import ImageFile

#: offset -> (length, digest of the chunk)
Chunks = dict[int, tuple[int, bytes]]


def summary(name: str, chunks: Chunks) -> ImageFile:
    """The file in four facts; its digest is that of its chunks' digests in order of offset."""
    ordered = [chunks[offset] for offset in sorted(chunks)]
    return ImageFile(
        name=name,
        size=sum(length for length, _ in ordered),
        chunks=len(ordered),
        digest=xxhash.xxh3_128(b"".join(digest for _, digest in ordered)).digest(),
    )


def is_whole(file: ImageFile, chunks: Chunks) -> bool:
    """Whether `chunks` lie side by side from 0 to the file's size and are those that the source sent."""
    end = 0
    for offset in sorted(chunks):
        if offset != end:
            return False
        end += chunks[offset][0]
    return bool(chunks) and summary(file.name, chunks) == file
