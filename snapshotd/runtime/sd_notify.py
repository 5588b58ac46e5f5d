"""Notifications to systemd (sd_notify): ready, stopping, status, and the watchdog of the event loop.

Without $NOTIFY_SOCKET (no systemd, or a unit of another type) every call does nothing. A lost notification is harmless.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

LOG = logging.getLogger(__name__)


def notify(*lines: str) -> bool:
    """Sends "READY=1", "STATUS=…" and the like. Returns whether systemd received them."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.connect(address)
            sender.send("\n".join(line.replace("\n", " ") for line in lines).encode())
    except OSError as error:
        LOG.warning("systemd could not be notified of %s: %s", lines[0], error)
        return False
    return True


def ready(status: str) -> None:
    notify("READY=1", f"STATUS={status}")


def stopping(status: str) -> None:
    notify("STOPPING=1", f"STATUS={status}")


def watchdog_interval_s() -> float | None:
    """The interval between pings: half of the unit's WatchdogSec. None if there is no watchdog for *this* process."""
    asked_us = os.environ.get("WATCHDOG_USEC", "")
    owner = os.environ.get("WATCHDOG_PID", "")
    if not asked_us.isdigit() or int(asked_us) == 0 or (owner and owner != str(os.getpid())):
        return None
    return int(asked_us) / 2_000_000


async def keep_watchdog(interval_s: float) -> None:
    """Pings for ever. If the event loop hangs, this task does not run, and systemd restarts the daemon."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
