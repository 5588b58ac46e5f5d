"""What the kernel's log says about failing hardware. NVML's events get lost, and the kernel reports disks nowhere else.

Only records of the kernel itself count: root can write any text into /dev/kmsg, but not as the kernel.

Invariant: no text that a user chooses makes a record match. Names of files and cgroups appear in the middle of records, and
the name of a process, up to 15 characters, also at the beginning: "NAME[123]: segfault at …". So a pattern matches from the
beginning, has fixed text beyond the 15th character, and skips no text that could be of a user.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.health import xids
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.windows import Counters
from snapshotd.runtime.blocking import Reader

log = logging.getLogger(__name__)

NAMES = ("gpu-xid", "host-mce", "host-oom", "host-hang", "disk-errors", "disk-read-only")
EVERY_S = 1.0
READ_LIMIT_S = 10.0
#: At the first start ever, older records do not count: what happened then is known or over.
FIRST_S = 3600.0
#: In one reading; the rest follows with the next ones.
MAX_RECORDS = 2000
_SEQUENCE = "kernel-log"  # among the counters
_READ_BYTES = 64 << 10


@dataclass(frozen=True)
class Record:
    sequence: int
    monotonic_s: float
    text: str


def parse(line: str) -> Record | None:
    """A record of the kernel, "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT". None: a continuation, or not of the kernel."""
    prefix, separator, text = line.partition(";")
    fields = prefix.split(",")
    if not separator or line.startswith(" ") or len(fields) < 3 or not all(each.isdigit() for each in fields[:3]):
        return None
    priority, sequence, microseconds = map(int, fields[:3])
    return Record(sequence, microseconds / 1e6, text) if priority >> 3 == 0 else None


# ------------------------------------------------------------ the rules

_DISK = r"(?!loop|sr\d|fd\d|ram|zram|nbd)[A-Za-z][\w-]*"
_DISK_REMEDY = "move the ranks of this node away if they use this disk, then examine it (smartctl -a, nvme smart-log)"
_MEMORY_REMEDY = "move the ranks of this node away, then have its memory and processors tested"
_READ_ONLY_REMEDY = (
    "look for the cause in the kernel's log, check the file system (fsck), and mount it for writing again"
)
_OOM_REMEDY = "find out which job needs more memory than this node has; a rank that was killed must be started again"

#: How records begin that the kernel writes about a process. The patterns below do not match these either.
_ABOUT_A_PROCESS = re.compile(
    r".{0,15}?(?:\[\d+\]|/\d+: | ?\(\d+\): | ?\(\d+\) used | invoked oom-killer|: page allocation (?:failure|stalls))"
)
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
_XID = re.compile(rf"NVRM: (?:[\w-]+: )?Xid \((?:PCI:)?({_PCI})\): (\d+)\b[, ]*(.*)")
#: Text of a driver: records about a process have a [ after its name, and an = before the name of a cgroup.
_OF_XFS = r"(?:[^\[=]|\[xfs\])*?"
_RULES: list[tuple[re.Pattern[str], str, str, Severity, str]] = [
    # pattern, check, subject (with groups), severity, remedy
    (
        re.compile(
            rf"(?:blk_update_request: )?(?:critical \w+|I/O|protection|\w+ \w+) error, dev ({_DISK}), sector \d"
        ),
        "disk-errors",
        r"disk:\1",
        Severity.WARNING,
        _DISK_REMEDY,
    ),
    (
        re.compile(rf"Buffer I/O error on (?:dev|device) ({_DISK})[, ]"),
        "disk-errors",
        r"disk:\1",
        Severity.WARNING,
        _DISK_REMEDY,
    ),
    (
        re.compile(r"nvme (nvme\d+): (?:controller is down|Removing after probe failure|Device not ready)"),
        "disk-errors",
        r"disk:\1",
        Severity.CRITICAL,
        _DISK_REMEDY,
    ),
    (
        re.compile(r"(?:EXT4-fs|F2FS-fs) \(([\w-]+)\): Remounting filesystem read-only"),
        "disk-read-only",
        r"disk:\1",
        Severity.CRITICAL,
        _READ_ONLY_REMEDY,
    ),
    (
        re.compile(rf"XFS \(([\w-]+)\): {_OF_XFS}(?:[Ss]hutting down [Ff]ilesystem|Filesystem has been shut down)"),
        "disk-read-only",
        r"disk:\1",
        Severity.CRITICAL,
        _READ_ONLY_REMEDY,
    ),
    (
        re.compile(r"BTRFS:? (?:\w+ )?\(device ([\w-]+)[^()\[=]*\):? (?:[\w ]+: )?forced readonly"),
        "disk-read-only",
        r"disk:\1",
        Severity.CRITICAL,
        _READ_ONLY_REMEDY,
    ),
    (re.compile(r"EDAC \w+: \d+ UE [^\[=]* on "), "host-mce", "host", Severity.CRITICAL, _MEMORY_REMEDY),
    (re.compile(r"Memory failure: 0x"), "host-mce", "host", Severity.CRITICAL, _MEMORY_REMEDY),
    (
        re.compile(r"(?:mce: )?\[Hardware Error\]: .*[Uu]ncorrected"),
        "host-mce",
        "host",
        Severity.CRITICAL,
        _MEMORY_REMEDY,
    ),
    (
        re.compile(r"mce: \[Hardware Error\]: (?:Machine check events logged|CPU \d+: Machine Check)"),
        "host-mce",
        "host",
        Severity.WARNING,
        _MEMORY_REMEDY,
    ),
    (re.compile(r"Out of memory: Killed process \d+"), "host-oom", "host", Severity.WARNING, _OOM_REMEDY),
    (re.compile(r"Memory cgroup out of memory: Killed process \d+"), "host-oom", "host", Severity.NOTICE, _OOM_REMEDY),
    (
        re.compile(r"(?:watchdog: )?BUG: (?:soft|hard) lockup - CPU"),
        "host-hang",
        "host",
        Severity.CRITICAL,
        "move the ranks of this node away and reboot it; if this returns, examine drivers and hardware",
    ),
    (
        re.compile(r"INFO: task .{1,15}:\d+ blocked for more than \d+ seconds"),
        "host-hang",
        "host",
        Severity.WARNING,
        "look at what the task waits for (the records that follow in the kernel's log): storage, a network, a GPU",
    ),
]


def judged(record: Record, gpu_at: Callable[[str], str]) -> Signal | None:
    """What a record means, if it means something. `gpu_at`: the UUID of the GPU at a PCI address, or ""."""
    if _ABOUT_A_PROCESS.match(record.text):
        return None
    if found := _XID.match(record.text):
        address, code = found[1], int(found[2])
        xid = xids.of(code)
        more = f" ({found[3].strip()[:200]})" if found[3].strip() else ""
        subject = f"gpu:{gpu_at(address) or address}"
        text = f"the driver reported Xid {code}: {xid.meaning}{more}"
        return Signal("gpu-xid", subject, xid.severity, text, xid.remedy, float(code))
    for pattern, check, subject, severity, remedy in _RULES:
        if found := pattern.match(record.text):
            text = f'the kernel reported "{record.text.strip()[:300]}"'
            return Signal(check, found.expand(subject), severity, text, remedy)
    return None


# ------------------------------------------------------------ the file


class KernelLog(Group):
    """Reads what was added to the log since the last reading, also if another daemon made that."""

    names = NAMES
    every_s = EVERY_S
    urgent = True

    def __init__(self, root: Path, counters: Counters, gpu_at: Callable[[str], str]) -> None:
        self._path = root / "dev/kmsg"
        self._counters, self._gpu_at = counters, gpu_at
        self._reader = Reader("kernel log")
        self._descriptor = -1
        self._rest = b""  # a line without its end, in a test's file

    @property
    def is_read(self) -> bool:
        return self._descriptor >= 0

    async def read(self, now: Now) -> list[Signal]:
        records = await self._reader.run(lambda: list(self._new(now)), READ_LIMIT_S)
        return [signal for record in records if (signal := judged(record, self._gpu_at)) is not None]

    async def close(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _new(self, now: Now) -> Iterator[Record]:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise Unable(f"{self._path} cannot be read: {error.strerror}") from error
        known = self._counters.values.get(_SEQUENCE)
        for record in self._records():
            if known is None and record.monotonic_s < now.monotonic_s - FIRST_S:
                continue
            if known is None or record.sequence > known:
                known = self._counters.values[_SEQUENCE] = record.sequence
                yield record

    def _records(self) -> Iterator[Record]:
        """The kernel returns one record for each read."""
        for _ in range(MAX_RECORDS):
            try:
                content = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read
                    log.warning("the kernel's log was written faster than it was read: records are missing")
                    continue
                self._close()
                raise Unable(f"{self._path} cannot be read: {error.strerror}") from error
            if not content:
                return
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                if (record := parse(line.decode(errors="replace"))) is not None:
                    yield record
