"""Builds, starts, observes and ends programs with the library preloaded."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from snapshotd.inprocess import shimctl
from snapshotd.proc import tree

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
#: Much longer than anything here takes: when it expires, something hangs.
STUCK_S = 60.0


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + STUCK_S
    while not condition():
        assert time.monotonic() < deadline, what or "this never came true"
        time.sleep(0.002)


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    command: list[str | Path] = [
        "cc",
        "-std=c11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
        output,
        source,
        *flags,
    ]
    subprocess.run(command, check=True)
    return output


class Job:
    """A running program, and its mailbox through `shimctl`."""

    def __init__(
        self, library: Path | None, *argv: str | Path, env: Mapping[str, str] = os.environ, setsid: bool = False
    ) -> None:
        self.popen = subprocess.Popen(
            argv,
            env={**env, "LD_PRELOAD": str(library)} if library else env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=setsid,
        )
        self.process = tree.Process.of(self.popen.pid)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def mailbox(self) -> shimctl.Mailbox:
        found = shimctl.find(self.process)
        assert found is not None
        return found

    def say(self, line: str = "") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def hear(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().decode().strip()

    def finish(self) -> tuple[str, str, int]:
        """Closes its stdin and waits for its exit; returns its output, errors and exit status."""
        output, errors = self.popen.communicate(timeout=STUCK_S)
        return output.decode(), errors.decode(), self.popen.returncode

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate(timeout=STUCK_S)


class Work(Job):
    """programs/work.c: threads of several kinds, each counting its steps."""

    def __init__(self, library: Path, program: Path, folder: Path, *kinds: str, wrap: tuple[str, ...] = ()) -> None:
        self.kinds = kinds
        self.file = folder / "counters"
        self.file.write_bytes(bytes(4096))
        super().__init__(library, *wrap, program, self.file, *kinds)
        with self.file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 4096)

    def counters(self) -> tuple[int, ...]:
        """Steps of the main thread, then of each other thread."""
        return struct.unpack_from(f"<{1 + 2 * len(self.kinds)}Q", self._map)

    def mailbox(self) -> shimctl.Mailbox:
        """Once its control thread serves it: on a busy machine the other threads may run long before."""
        found = super().mailbox()
        until(found.serves, "no control thread")
        return found

    def handled_signals(self) -> int:
        return int(struct.unpack_from("<Q", self._map, 800)[0])

    def moves(self) -> None:
        """Waits until every thread has made a step."""
        before = self.counters()
        until(
            lambda: all(now > then for now, then in zip(self.counters(), before, strict=True)), f"stuck: {self.kinds}"
        )

    def stands_still(self) -> None:
        before = self.counters()
        time.sleep(0.02)
        assert self.counters() == before

    def end(self) -> None:
        super().end()
        self._map.close()


def python(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: tree.stopped(pid))
