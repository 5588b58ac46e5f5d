"""The host memory that held device memory needs on its way: a window of each stripe's file, and pinned memory.

It does not depend on the size of the memory. Invariant: a move reserves these bytes before the freeze on both nodes.
"""

from __future__ import annotations

#: On the source, in front of what was sent, and behind it: a connection that breaks may have lost that much.
COPIED_AHEAD_BYTES, COPIED_BEHIND_BYTES = 48 << 20, 48 << 20
#: On the target, how much may be in the file before it is on the GPU. More than a receiver reports at a time.
FILLED_AHEAD_BYTES = 64 << 20
#: How far back a sender may refer to equal bytes, and what stays of each file behind what is on the GPU.
TWINS_BYTES = 16 << 20
FILLED_BEHIND_BYTES = 2 * TWINS_BYTES
#: Pinned memory of each stripe, in slots. The source's process has one of its own.
_COPIER_SLOTS, _FILLER_SLOTS = 3, 2


def source_bytes(stripes: int, slot_bytes: int) -> int:
    """What so many stripes need on the source."""
    return stripes * (COPIED_AHEAD_BYTES + COPIED_BEHIND_BYTES + _COPIER_SLOTS * slot_bytes)


def target_bytes(stripes: int, slot_bytes: int) -> int:
    """What so many stripes need on a target that fills memory while they arrive."""
    return stripes * (FILLED_AHEAD_BYTES + FILLED_BEHIND_BYTES + _FILLER_SLOTS * slot_bytes)


def of_process(stripes: int, slot_bytes: int) -> int:
    """What the memory of one process needs at most, on either node."""
    return max(source_bytes(stripes, slot_bytes), target_bytes(stripes, slot_bytes))
