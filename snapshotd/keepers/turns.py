"""How much of the daemon's event loop the keepers of one user may use.

Invariant: no user can keep the daemon busy. What a keeper sends is handled in short slices, between which all other work
gets its turn, and the processor time that it takes is counted by user. The keepers of a user that exceeds its share are read
more slowly; they then wait, and so does what their ranks print. Root's keepers take turns too, but have no limit.

The numbers: in a fifth of a core the daemon reads 20 MB of output a second in frames of 4 KiB, and 200 MB in those of 64 KiB
that a keeper under pressure sends. That is more than logs need. BURST_S is the time for the largest stdio state of a move
(48 MiB), several times over, so that a pause never waits.
"""

from __future__ import annotations

import asyncio
import time

from snapshotd.runtime.pace import Pace

SLICE_S = 0.005
SHARE, BURST_S = 0.2, 0.5
SHARE_OF_ALL, BURST_OF_ALL_S = 0.6, 1.5
#: A hello costs at least this, also if it is refused: 400 in a second of one user, and 1,000 at once.
HELLO_S = 0.0005
_ALL = "all"


class Turns:
    """The time that the frames of each user have taken."""

    def __init__(self) -> None:
        self._each, self._all = Pace(SHARE, BURST_S), Pace(SHARE_OF_ALL, BURST_OF_ALL_S)

    async def used(self, user_id: int, seconds: float) -> None:
        """Counts time of a user, and returns when its frames may be handled again: at the earliest in the next turn."""
        wait_s = 0.0
        if user_id != 0:
            now_s = time.monotonic()
            wait_s = max(self._each.wait_s(user_id, seconds, now_s), self._all.wait_s(_ALL, seconds, now_s))
        await asyncio.sleep(wait_s)
