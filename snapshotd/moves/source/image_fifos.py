"""The FIFOs into which criu writes the large images of a dump: they stand where it would make files."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from snapshotd.proc import deleted
from snapshotd.transport.image.fifo import make_fifo

#: FIFOs beyond the foreseeable ones. criu makes a plain file where one is missing, which works but takes memory.
SPARE_FIFOS = 8


def make(folder: Path, pids: list[int], opened: ExitStack) -> dict[str, int]:
    """Makes the folder anew, with a FIFO for every possibly large image; the descriptors of their reading ends. criu numbers
    pages by process, then shared memory; ghosts by file.

    `opened` closes the descriptors, also those that were opened before a failure. Blocking."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    unnamed = deleted.count_files(pids)
    names = [f"pages-{number}.img" for number in range(1, len(pids) + unnamed + SPARE_FIFOS)]
    names += [f"ghost-file-{number:x}.img" for number in range(1, unnamed + SPARE_FIFOS)]
    fifos: dict[str, int] = {}
    for name in names:
        fifos[name] = make_fifo(folder, name)
        opened.callback(os.close, fifos[name])
    return fifos
