"""When a disk that stores an image counts as stalled: not when it is slow, but when it gets nothing done."""

from __future__ import annotations

import time

from snapshotd.api.errors import Timeout, Where

#: Longer than a kernel waits for a disk before it gives a request up: 30 s, of NVMe and of SCSI.
STALLED_S = 60.0


class Stall:
    """Watches one image on its way to a disk."""

    def __init__(self, whose: str) -> None:
        self._whose, self._most_bytes, self._since_s = whose, -1, time.monotonic()

    def look(self, synced_bytes: int) -> None:
        """`synced_bytes`: what the disk has so far. Raises Timeout if that has not grown for too long."""
        if synced_bytes > self._most_bytes:
            self._most_bytes, self._since_s = synced_bytes, time.monotonic()
        elif time.monotonic() - self._since_s >= STALLED_S:
            raise Timeout(
                f"the disk of {self._whose} has written nothing of the image for {STALLED_S:.0f} s",
                remedy="check the disk of that node: `dmesg` there says more; then retry",
                where=Where.UNKNOWN,
            )
