"""Holds shared locks of every kind on shared files, as a reader of a dataset does, and checks in every step that it has them.

    locks.py FOLDER [--end-file FILE]

While FOLDER/take exists it also holds an exclusive one, as a download does.
"""

import fcntl
import os
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workloads"))

from steps import say, steps, wrong

F_OFD_SETLK = 37


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def ofd(file: int, kind: int) -> None:
    fcntl.fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))


folder = Path(sys.argv[1])
KINDS = ("flock", "posix", "ofd")
# Opened once: closing any descriptor of a file releases the process's POSIX locks on it.
held = {kind: opened(folder / kind) for kind in KINDS}
probes = {kind: opened(folder / kind) for kind in KINDS}
fcntl.flock(held["flock"], fcntl.LOCK_SH)
fcntl.lockf(held["posix"], fcntl.LOCK_SH)
ofd(held["ofd"], fcntl.F_RDLCK)
exclusive = opened(folder / "exclusive")
wanted = False

for step in steps():
    for kind, probe in probes.items():
        try:
            if kind == "flock":
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                ofd(probe, fcntl.F_WRLCK)
        except BlockingIOError:
            continue
        wrong(f"the {kind} lock is gone")
    if wanted != (folder / "take").exists():
        wanted = not wanted
        fcntl.flock(exclusive, fcntl.LOCK_EX if wanted else fcntl.LOCK_UN)
    say(step, "exclusive" if wanted else "shared")
