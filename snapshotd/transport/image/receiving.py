"""What the image store knows about a move whose chunks are arriving."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.api.errors import Damaged, WrongState
from snapshotd.transport.image.chunk_list import Chunks
from snapshotd.transport.image.frame import IMAGE_NAME, MAX_FILE_BYTES, Frame
from snapshotd.transport.image.overlay import Covered, file_of

#: What is sent while the rank still runs begins with this. If the source does not list it later, it was sent before a restart
#: of the source's daemon, and counts as nothing.
AHEAD = "ahead-"


def check_sane(frame: Frame) -> None:
    """Checked by the parser as well; the store does not rely on its caller."""
    if not IMAGE_NAME.fullmatch(frame.name):
        raise Damaged(f"{frame.name[:100]!r} is not the name of an image file")
    if frame.offset < 0 or frame.length < 0 or frame.offset + frame.length > MAX_FILE_BYTES:
        raise Damaged(f"{frame.name}: a chunk at {frame.offset} of {frame.length} bytes is beyond {MAX_FILE_BYTES}")


@dataclass
class Receiving:
    """A move whose chunks are arriving. Guarded by its condition."""

    directory: Path
    capacity_bytes: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    chunks: dict[str, Chunks] = field(default_factory=dict)
    chunk_count: int = 0
    written_bytes: int = 0
    writers: int = 0
    closed: bool = False  # being sealed or dropped: no writer may begin
    beside: tuple[str, ...] = ()  # files of the move that the device-memory channel writes
    beside_bytes: int = 0  # … and the memory reserved for them
    rings_bytes: int = 0  # of `capacity_bytes`: all that was reserved for them, if they are rings
    refused: str = ""  # why nothing more is written
    covered: Covered = field(default_factory=Covered)

    def close(self) -> None:
        """Admits no more writers and waits for the active ones. The caller holds the condition."""
        if self.closed:
            raise WrongState(f"the images of {self.directory.name} are already being sealed or dropped")
        self.closed = True
        self.changed.wait_for(lambda: not self.writers)

    def taken_beside_bytes(self) -> int:
        """The memory that those files take, including what is reserved ahead."""
        taken_bytes = 0
        for name in self.beside:
            with suppress(FileNotFoundError):
                taken_bytes += (self.directory / name).stat(follow_symlinks=False).st_blocks * 512
        return taken_bytes

    def drop_unlisted(self, listed: Iterable[str]) -> None:
        """Removes what was sent ahead in vain, but no round of a file with others that are listed: it is unexpected. The
        caller holds the condition, and no chunk is being written."""
        files = {file_of(name) for name in listed}
        for name in [name for name in self.chunks if name.startswith(AHEAD) and file_of(name) not in files]:
            with suppress(FileNotFoundError):
                (self.directory / file_of(name)).unlink()
            del self.chunks[name]
