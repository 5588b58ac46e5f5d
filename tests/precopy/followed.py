"""A program whose pages a test writes, and what the tracker has found of them, as the target would have it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from snapshotd.precopy.messages import PAGE_BYTES
from snapshotd.precopy.tracker import Tracker
from tests.shim.jobs import Job


class Pages(Job):
    """programs/pages.c"""

    def __init__(self, library: Path, program: Path) -> None:
        super().__init__(library, program)
        assert self.hear() == "ready"
        self.at: dict[str, int] = {}

    def do(self, line: str) -> str:
        self.say(line)
        answer = self.hear()
        verb, name = line.split()[:2] if " " in line else (line, "")
        if verb == "map":
            self.at[name] = int(answer)
        return answer

    def flags(self, name: str) -> set[str]:
        """What the kernel says of the mapping that begins there."""
        head, found = f"{self.at[name]:x}-", False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                found = line.startswith(head)
            elif found and line.startswith("VmFlags"):
                return set(line.split()[1:])
        return set()

    def content(self, address: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), PAGE_BYTES, address)


class Copy:
    """What a target would have: the file's pages, in slots."""

    def __init__(self, job: Pages) -> None:
        self.job = job
        self.tracker = Tracker(job.process)
        self.tracker.begin(job.mailbox())
        self.slots: dict[int, bytes] = {}
        self.scanned = 0

    def round(self) -> set[int]:
        """Scans, and takes what was written. Returns the addresses of the pages with content."""
        self.scanned = self.tracker.scan() // PAGE_BYTES
        got = set()
        while (chunk := self.tracker.next()) is not None:
            at = 0
            for page in range(chunk.length // PAGE_BYTES):
                if chunk.bitmap[page // 8] >> page % 8 & 1:
                    address = self.address(chunk.offset + page * PAGE_BYTES)
                    self.slots[address] = chunk.payload[at : at + PAGE_BYTES]
                    at += PAGE_BYTES
                    got.add(address)
            assert at == len(chunk.payload)
        return got

    def address(self, offset: int) -> int:
        for start, end in self.tracker.layout.ranges:
            if offset < end - start:
                return start + offset
            offset -= end - start
        raise AssertionError("behind the last slot")

    def pages(self, name: str, addresses: set[int], limit: int = 1 << 40) -> list[int]:
        """Which pages of a mapping these are."""
        start = self.job.at[name]
        return sorted((one - start) // PAGE_BYTES for one in addresses if start <= one < start + limit)

    def finish(self) -> set[int]:
        """The pages that the target has. Each must have the content that the process has."""
        below = {self.address(slot * PAGE_BYTES) for slot, is_current in enumerate(self.tracker.finish()) if is_current}
        for address in below:
            assert self.slots[address] == self.job.content(address), hex(address)
        return below

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.tracker.close()
