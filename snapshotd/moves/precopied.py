"""Memory that was sent to the target while the rank ran: the state between the rounds and the freeze, and what counts then.

snapshotd/moves/source/precopy.py sends it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.criu.below import Layer, ahead_pages_name
from snapshotd.precopy import devices
from snapshotd.precopy.tracker import Tracker, Unsupported
from snapshotd.transport.image.overlay import file_of

log = logging.getLogger(__name__)


@dataclass
class Followed:
    """One process."""

    tracker: Tracker
    inner_pid: int
    failed: str = ""

    @property
    def file(self) -> str:
        return ahead_pages_name(self.inner_pid, 1)

    @property
    def pid(self) -> int:
        return self.tracker.process.pid


@dataclass
class Precopy:
    """The state between the rounds and the freeze."""

    followed: list[Followed] = field(default_factory=list)
    files: list[pb.ImageFile] = field(default_factory=list)  # all rounds that were sent
    sent_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    begun: bool = False  # whether anything may have been sent

    def finish(self) -> Precopied:
        """The rank is frozen. Nothing is followed any more when this returns. Blocking, and raises nothing."""
        found = Precopied(begun=self.begun)
        for one in self.followed:
            try:
                if reason := devices.writers_of(one.pid):
                    raise Unsupported(reason)
                pages = one.tracker.finish()
            except (OSError, SnapshotError, Unsupported) as error:
                log.warning("what was sent of process %d before the freeze does not count: %s", one.pid, error)
            else:
                if pages:
                    ranges = one.tracker.layout.ranges
                    found.layers.append(Layer(pid=one.inner_pid, pages=pages, parent=None, rounds=[ranges]))
                    found.files += [file for file in self.files if file_of(file.name) == one.file]
                    found.pids.append(one.pid)
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

    layers: list[Layer] = field(default_factory=list)
    files: list[pb.ImageFile] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    begun: bool = False  # whether anything may have been sent, which need not count

    @property
    def bytes(self) -> int:
        return sum(end - start for layer in self.layers for start, end in layer.pages)
