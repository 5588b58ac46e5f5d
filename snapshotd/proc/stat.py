"""/proc/PID/stat: the state, parent and start time of a process or thread."""

from __future__ import annotations

import os
from dataclasses import dataclass

from snapshotd.proc.files import GONE, process_path, read_text

_PF_EXITING = 0x4


@dataclass(frozen=True, slots=True)
class Stat:
    pid: int
    name: str
    state: str  # one letter
    parent: int
    group: int
    session: int
    flags: int  # of the kernel's task
    threads: int
    start_ticks: int  # clock ticks after boot

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"

    @property
    def exiting(self) -> bool:
        """Whether it has begun to end: it may no longer have memory, and is not a zombie yet. A program that another thread
        replaces looks the same for a moment."""
        return bool(self.flags & _PF_EXITING)

    @property
    def stopped(self) -> bool:
        """Whether it cannot run user code: stopped by a signal or a tracer, or dead."""
        return self.state in "TtZXx"


def parse(text: str) -> Stat:
    # The name is in parentheses and may itself contain spaces and parentheses: only the last one ends it.
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()  # the first of them is field 3 of proc(5)
    return Stat(
        pid=int(pid),
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        flags=int(fields[6]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def read(pid: int, thread: int | None = None) -> Stat:
    """The stat of a process or one of its threads. Raises ProcessLookupError if it has ended."""
    try:
        return parse(read_text(process_path(pid, "stat", thread)))
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error


def exiting(pid: int) -> bool:
    """Whether a process has begun to end, or has ended."""
    try:
        return read(pid).exiting
    except ProcessLookupError:
        return True


def read_threads(pid: int) -> list[Stat]:
    """The stat of every thread of a process; empty if the process has ended."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                found.append(read(pid, int(thread)))
            except ProcessLookupError:
                continue
    except GONE:
        pass
    return found
