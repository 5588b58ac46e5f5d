"""A job with device memory, and the daemon's commands to it. The stripes are files of the test."""

from __future__ import annotations

import array
import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotd.inprocess import devmem, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.mailbox import Answer
from tests.descriptors import open_links
from tests.shim.jobs import STUCK_S, Job

PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20
OPEN, READY, OFFLOAD = Command.MEMORY_OPEN, Command.MEMORY_READY, Command.MEMORY_OFFLOAD
FILL, DROP = Command.MEMORY_FILL, Command.MEMORY_DROP
STRIPES = 3
Block = tuple[int, int, int]
#: No divisor of any block's size, so that last chunks are shorter; no multiple of four pages, which are copied as a group.
SLOT_BYTES = MIB + 9 * 4096


class Refused(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{errno.errorcode.get(answer.status, answer.status)}: {answer.text}")
        self.status = answer.status
        self.text = answer.text


@contextmanager
def refused(status: int, text: str | None = None) -> Iterator[None]:
    with pytest.raises(Refused, match=text) as caught:
        yield
    assert caught.value.status == status, caught.value


class DeviceJob(Job):
    """programs/job.c."""

    def __init__(self, library: Path | None, *argv: Path | str, env: Mapping[str, str], folder: Path) -> None:
        super().__init__(library, *argv, env=env)
        self.folder = folder
        folder.mkdir()

    def do(self, line: str) -> str:
        self.say(line)
        answer = self.hear()
        assert answer, self.popen.poll()
        return answer

    def blocks(self) -> list[Block]:
        """Address, bytes and number of each of its blocks, in the order of addresses."""
        found = [tuple(map(int, word.split(":"))) for word in self.do("list").split()]
        return sorted((address, size, number) for address, size, number in found)

    @property
    def paths(self) -> list[Path]:
        return [self.folder / f"device-{stripe}" for stripe in range(STRIPES)]

    def state(self) -> shimctl.DeviceMemory:
        return self.mailbox().device_memory()

    def ask(self, command: Command, *arguments: int, timeout_s: float = STUCK_S) -> tuple[int, int]:
        answer = self.mailbox().ask(command, timeout_s, *arguments)
        if answer.status:
            raise Refused(answer)
        return answer.first, answer.second

    @contextmanager
    def files(self, flags: int, paths: Sequence[Path] = ()) -> Iterator[list[int]]:
        opened = [os.open(path, flags | os.O_CLOEXEC, 0o600) for path in paths or self.paths]
        try:
            yield opened
        finally:
            for file in opened:
                os.close(file)

    def hand_over(self, files: Sequence[int]) -> None:
        self.mailbox().cancel_device(False)
        theirs, _ = self.ask(OPEN)
        with devmem._descriptor(self.process, theirs) as connection:
            connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])

    def ready(self, flags: int = os.O_RDWR | os.O_CREAT | os.O_TRUNC, slot_bytes: int = SLOT_BYTES) -> int:
        with self.files(flags) as files:
            self.hand_over(files)
            return self.ask(READY, len(files), slot_bytes)[0]

    def park_threads(self, *, outside_driver: bool = False) -> None:
        self.mailbox().park(STUCK_S, outside_driver=outside_driver)

    def release(self) -> None:
        self.mailbox().release(STUCK_S)

    def offload(self, *, timeout_s: float = STUCK_S) -> int:
        """Offloads the memory of a running job, with all steps."""
        self.ready()
        self.park_threads()
        return self.ask(OFFLOAD, timeout_s=timeout_s)[0]

    def fill(self, *, timeout_s: float = STUCK_S) -> int:
        self.ready(os.O_RDONLY)
        return self.ask(FILL, timeout_s=timeout_s)[0]

    def come_back(self) -> None:
        """Restores and releases the job from any state in which its threads are parked, and checks its content."""
        if self.state().offloaded:
            self.fill()
        self.ask(DROP)
        self.is_unharmed()

    @contextmanager
    def under_way(self, command: Command) -> Iterator[list[int]]:
        """Sends a command in the background; the list gets its errno at the end."""
        answers: list[int] = []

        def ask() -> None:
            try:
                self.ask(command)
                answers.append(0)
            except Refused as error:
                answers.append(error.status)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield answers
        finally:
            thread.join()

    def is_settled(self, *, offloaded: bool) -> None:
        """Asserts where the memory is, and that the last command has left nothing."""
        assert self.state().offloaded is offloaded
        assert self.leftovers() == []

    def is_unharmed(self) -> None:
        self.release()
        assert self.do("check") == "same"

    def leftovers(self) -> list[str]:
        """Descriptors that OPEN and READY have left."""
        return [link for link in open_links(self.pid).values() if str(self.folder) in link or "socket" in link]

    def workers(self) -> list[int]:
        """The library's threads that copy."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sorted(int(task.name) for task in tasks.iterdir() if (task / "comm").read_text() == "snapshim-memory\n")
