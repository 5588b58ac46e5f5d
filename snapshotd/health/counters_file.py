"""Keeps the counters of the last reading between two daemons: STATE_DIR/health.counters.

It need not survive a crash of the machine, so it is not synchronised to the disk. Without it, counters begin anew.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from snapshotd.health.windows import Counters

log = logging.getLogger(__name__)

FILE = "health.counters"
#: Begins anew with each boot, unlike those that only shrink when something was reset.
OF_A_BOOT = ("kernel-log",)


class _Content(msgspec.Struct):
    boot_id: str
    values: dict[str, int]


def load(state_dir: Path, boot_id: str) -> Counters:
    try:
        content = msgspec.json.decode((state_dir / FILE).read_bytes(), type=_Content)
    except FileNotFoundError:
        return Counters()
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read, counters begin anew: %s", state_dir / FILE, error)
        return Counters()
    same = content.boot_id == boot_id
    return Counters({key: value for key, value in content.values.items() if same or key not in OF_A_BOOT})


def save(state_dir: Path, boot_id: str, values: dict[str, int]) -> None:
    """Never raises: a full disk costs nothing but this."""
    new = state_dir / f"{FILE}.new"
    try:
        new.write_bytes(msgspec.json.encode(_Content(boot_id, values)))
        os.replace(new, state_dir / FILE)
    except OSError as error:
        log.debug("%s cannot be written: %s", new, error)
