"""Notifications to systemd, received on a real datagram socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.runtime import sd_notify


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def test_ready_and_stopping(systemd: socket.socket) -> None:
    sd_notify.ready("node node-1")
    assert systemd.recv(4096) == b"READY=1\nSTATUS=node node-1"
    sd_notify.stopping("two\nlines")
    assert systemd.recv(4096) == b"STOPPING=1\nSTATUS=two lines"


def test_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"snapshotd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert sd_notify.notify("WATCHDOG=1")
        assert listener.recv(64) == b"WATCHDOG=1"


def test_without_a_listener_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not sd_notify.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not sd_notify.notify("READY=1")


@pytest.mark.parametrize(
    ("asked_us", "pid", "expected_s"),
    [
        ("30000000", "", 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("", "", None),
        ("0", "", None),
        ("soon", "", None),
    ],
)
def test_watchdog_interval(monkeypatch: pytest.MonkeyPatch, asked_us: str, pid: str, expected_s: float | None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", asked_us)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert sd_notify.watchdog_interval_s() == expected_s


async def test_watchdog_pings_only_while_the_event_loop_runs(systemd: socket.socket) -> None:
    systemd.setblocking(False)
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(sd_notify.keep_watchdog(0.02))
    for _ in range(3):
        assert await asyncio.wait_for(loop.sock_recv(systemd, 64), 60) == b"WATCHDOG=1"
    with contextlib.suppress(BlockingIOError):
        while True:
            systemd.recv(64)
    time.sleep(0.2)  # the loop hangs, ten intervals long
    with pytest.raises(BlockingIOError):
        systemd.recv(64)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
