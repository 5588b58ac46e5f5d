"""What the daemon and the child that reads a rank's memory say to each other: one request, one or more answers.

    BEGIN forked     five descriptors: userfaultfd, pagemap, mem, smaps, the buffer  →  ranges: the layout
    SCAN             → how many pages were written since they were last protected; they are protected again
    NEXT slot        → the next chunk of those pages, whose content is in that slot of the buffer; none: the round is over
    FINISH part      → how many slots: in the buffer, a byte for each of them, 1 if its page was sent and not written since.
                       The process is stopped. Tracking ends with the first part; one without slots is the last

A failure is an errno, after which only the end of the child is of use. Ranges come in batches; an empty one is the last.
"""

from __future__ import annotations

import struct

BEGIN, SCAN, NEXT, FINISH = 1, 2, 3, 4
DESCRIPTORS = 5
PAGE_BYTES = 4096
#: A chunk covers at most this much of the layout, and begins at a multiple of it from the start of its range.
CHUNK_BYTES = 2 << 20
SLOTS = 2

REQUEST = struct.Struct("<BI")
#: errno, and what the request asks for: pages, or of a chunk its offset, length and payload; the bitmap of its pages follows.
ANSWER = struct.Struct("<iQQQ")
RANGE = struct.Struct("<QQ")
BATCH = 2000
MESSAGE_BYTES = 64 << 10
