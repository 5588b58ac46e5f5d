"""How criu is ended when a dump is given up. integration/test_given_up_dumps.py does it with the real one."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from snapshotd.moves.source import image_fifos


class Writer:
    """In place of the cgroup of criu: a thread that writes pages until a write fails, or for ever."""

    def __init__(self, fifo: Path, *, gives_up: bool) -> None:
        self.killed: list[float] = []
        self._gives_up, self._fifo = gives_up, fifo
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        with self._fifo.open("wb", buffering=0) as fifo:
            while True:
                try:
                    fifo.write(b"p" * 4096)
                except BrokenPipeError:
                    break
        while not self._gives_up and not self.killed:
            time.sleep(0.01)

    def pids(self) -> list[int]:
        return [7] if self._thread.is_alive() else []

    def kill(self, deadline_s: float) -> None:
        self.killed.append(deadline_s)


def end(folder: Path, *, gives_up: bool) -> Writer:
    with ExitStack() as opened:
        fifos = image_fifos.make(folder, [os.getpid()], opened)
        writer = Writer(folder / "pages-1.img", gives_up=gives_up)
        group: Any = writer
        image_fifos.end_criu(group, folder, fifos.values())
        assert all(os.read(fd, 1) == b"" for fd in fifos.values()), "who reads comes to the end"
    return writer


def test_writer_ends_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = end(tmp_path / "images", gives_up=True)
    assert not writer.pids()
    assert not caplog.records


def test_writer_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(image_fifos, "FAIL_S", 0.1)
    writer = end(tmp_path / "images", gives_up=False)
    assert writer.killed
    assert "criu has not ended by itself" in caplog.text
