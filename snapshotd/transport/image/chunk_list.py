"""The chunks of an image file, as the source sent them and as the target stored them.

Both nodes compute the file's `ImageFile` with the same function. If the results differ, the file is not complete.
"""

from __future__ import annotations

import hashlib

from snapshotd.api.snapshotd_pb2 import ImageFile

#: offset -> (length, digest of the chunk)
Chunks = dict[int, tuple[int, bytes]]


def summary(name: str, chunks: Chunks) -> ImageFile:
    """Name, size, number of chunks and digest, which is that of the chunks' digests in order of offset."""
    ordered = [chunks[offset] for offset in sorted(chunks)]
    return ImageFile(
        name=name,
        size=sum(length for length, _ in ordered),
        chunks=len(ordered),
        digest=hashlib.sha256(b"".join(digest for _, digest in ordered)).digest(),
    )


def is_complete(file: ImageFile, chunks: Chunks) -> bool:
    """Whether `chunks` cover the file from 0 to its size without gaps, and are those that the source sent."""
    end = 0
    for offset in sorted(chunks):
        if offset != end:
            return False
        end += chunks[offset][0]
    return bool(chunks) and summary(file.name, chunks) == file
