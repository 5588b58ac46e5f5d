"""The socket of another process, through whichever of its holders still has it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable

from snapshotd.net.flows import Holder
from snapshotd.net.sockets import borrow

log = logging.getLogger(__name__)


def borrow_from(holders: Iterable[Holder], inode: int) -> socket.socket | None:
    """None when no holder is left: each has ended, or has closed it."""
    for holder in holders:
        try:
            return borrow(holder, inode)
        except ProcessLookupError as error:
            log.info("socket %d: %s", inode, error)
    return None
