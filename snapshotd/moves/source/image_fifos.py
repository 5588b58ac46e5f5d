"""The FIFOs into which criu writes the large images of a dump: they stand where it would make files.

Without readers they end a dump that is given up: criu fails with its next write, and takes its code out of the processes. It
must not be killed before that. A process that is just running criu's code has no tracer then, and dies by SIGTRAP at the end
of that code: this killed 6 ranks in 123 dumps whose criu was killed at random moments.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from snapshotd.proc import deleted
from snapshotd.proc.cgroup import Cgroup
from snapshotd.transport.image.fifo import make_fifo

log = logging.getLogger(__name__)

#: FIFOs beyond the foreseeable ones. criu makes a plain file where one is missing, which works but takes memory.
SPARE_FIFOS = 8
#: How long criu may take to fail: it has to look at all processes of a large tree, or at none.
FAIL_S = 20.0
#: How often it is looked at, at first and after a second.
_LOOK_S, _LATER_S = 0.01, 0.1


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


def end_criu(group: Cgroup, folder: Path, readers: Iterable[int] = ()) -> None:
    """Has the criu in this cgroup fail, if it is still dumping, and waits until it has ended. One that does not end in FAIL_S
    is killed. `readers`: the descriptors of `make`, which have come to their end afterwards. Blocking."""
    end, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.close(write)
    try:
        for fd in readers:  # not closed: a thread may just be reading, and the number must not be used again
            os.dup2(end, fd, inheritable=False)
    finally:
        os.close(end)
    began_s = time.monotonic()
    while group.pids() and (waited_s := time.monotonic() - began_s) < FAIL_S:
        for path in folder.glob("*.img"):
            if path.is_fifo():  # criu waits in open() until its FIFO has a reader
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        time.sleep(_LOOK_S if waited_s < 1 else _LATER_S)
    if group.pids():
        log.warning("criu has not ended by itself in %.0f s: killing it, which may kill the rank as well", FAIL_S)
    group.kill(10)
