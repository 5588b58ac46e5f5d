"""When an image on its way to a disk or a node counts as stalled: not when it is slow, but when nothing is done."""

from __future__ import annotations

import time

from snapshotd.api.errors import Timeout, Where

#: Longer than a kernel waits for a disk before it gives a request up: 30 s, of NVMe and of SCSI.
STALLED_S = 60.0


def of_disk(node: str) -> Stall:
    """Of an image on its way to the disk of this node."""
    return Stall(f"the disk of {node} has written nothing of the image", node)


class Stall:
    """Watches one image."""

    def __init__(self, found: str, of_node: str = "") -> None:
        """`found`: what is said of one that has stalled. `of_node`: the node whose fault that is."""
        self._of_node = of_node
        self._found, self._most_bytes, self._since_s = found, -1, time.monotonic()

    def look(self, done_bytes: int) -> None:
        """`done_bytes`: what the disk has so far, or the other node. Raises Timeout if that has not grown for too long."""
        if done_bytes > self._most_bytes:
            self._most_bytes, self._since_s = done_bytes, time.monotonic()
        elif time.monotonic() - self._since_s >= STALLED_S:
            error = Timeout(
                f"{self._found} for {STALLED_S:.0f} s",
                remedy="check the disk of that node: `dmesg` there says more; then retry",
                where=Where.UNKNOWN,
            )
            error.of_node = self._of_node
            raise error
