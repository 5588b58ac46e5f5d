"""Memory that was sent to the target while the rank ran: the state between the rounds and the freeze, and what counts then.

snapshotd/moves/source/precopy.py sends it, and snapshotd/moves/source/last_round.py what was written since.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.criu.below import ahead_pages_name
from snapshotd.precopy import devices
from snapshotd.precopy.layout import Layout
from snapshotd.precopy.tracker import Chunk, Tracker, Unsupported
from snapshotd.transport.image.overlay import file_of

log = logging.getLogger(__name__)


@dataclass
class Followed:
    """One process."""

    tracker: Tracker
    inner_pid: int
    rounds: int = 0  # that were begun
    #: By the offset of each chunk: a bit for each of its pages, lowest first, whose slot on the target may have content.
    filled: dict[int, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def file(self) -> str:
        return ahead_pages_name(self.inner_pid, 1)

    @property
    def pid(self) -> int:
        return self.tracker.process.pid

    def sending(self, chunk: Chunk) -> None:
        self.filled[chunk.offset] = self.filled.get(chunk.offset, 0) | int.from_bytes(chunk.bitmap, "little")


@dataclass(frozen=True)
class SentMemory:
    """What the target has of one frozen process."""

    followed: Followed
    layout: Layout
    current: bytes  # a byte for each slot: 1 if it has the page as it is now


@dataclass
class Precopy:
    """The state between the rounds and the freeze."""

    followed: list[Followed] = field(default_factory=list)
    files: list[pb.ImageFile] = field(default_factory=list)  # all rounds that were sent
    sent_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    #: The processes of which anything may have been sent, by the pids of their own namespace.
    begun: set[int] = field(default_factory=set)

    def finish(self) -> Precopied:
        """The rank is frozen. Nothing is followed any more when this returns. Blocking, and raises nothing."""
        found = Precopied(begun=self.begun)
        for one in self.followed:
            try:
                if reason := devices.writers_of(one.pid):
                    raise Unsupported(reason)
                layout, current = one.tracker.layout, one.tracker.finish()
            except (OSError, SnapshotError, Unsupported) as error:
                log.warning("what was sent of process %d before the freeze does not count: %s", one.pid, error)
            else:
                if 1 in current:
                    found.ahead.append(SentMemory(one, layout, current))
                    found.files += [file for file in self.files if file_of(file.name) == one.file]
            finally:
                one.tracker.close()
        self.followed = []
        return found

    def close(self) -> None:
        """Nothing is followed any more when this returns. Idempotent. Blocking."""
        for one in self.followed:
            one.tracker.close()
        self.followed = []


@dataclass
class Precopied:
    """What the target has of the frozen rank."""

    ahead: list[SentMemory] = field(default_factory=list)
    files: list[pb.ImageFile] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  # of which anything may have been sent, which need not count
