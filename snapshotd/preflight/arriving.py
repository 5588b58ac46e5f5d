"""How much host memory a rank needs on the node that it comes to: for its image, and for the stripes of its device memory.

Invariant: preflight checks for what Prepare reserves.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.api.snapshotd_pb2 import RankFacts
from snapshotd.transport.device import ring


@dataclass(frozen=True)
class Arriving:
    image_bytes: int  # what comes with the image, at most, without carried files
    stripes_bytes: int  # what the files of the stripes take, at most
    rings: bool  # they are rings, whatever the size of the device memory

    @property
    def all_bytes(self) -> int:
        return self.image_bytes + self.stripes_bytes


def arriving(facts: RankFacts, *, holds: bool) -> Arriving:
    """`holds`: this node fills memory on its GPU while it arrives, if the source keeps it there until it is sent."""
    offloaded = min(facts.gpu.offloaded_bytes, facts.memory_bytes)
    image_bytes = facts.memory_bytes - offloaded
    if not holds or not facts.gpu.held_stripes:
        return Arriving(image_bytes, offloaded, rings=False)
    return Arriving(image_bytes, ring.memory_bytes(facts.gpu.held_stripes), rings=True)


def stays_bytes(facts: RankFacts) -> int:
    """The host memory that its device memory needs on the source meanwhile."""
    device = facts.gpu.device_bytes
    if not facts.gpu.held_stripes:
        return device
    offloaded = min(facts.gpu.offloaded_bytes, device)
    return device - offloaded + ring.memory_bytes(facts.gpu.held_stripes)
