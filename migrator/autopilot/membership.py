"""Which etcd a state folder belongs to. The autopilot writes it there, so that no other command needs to be told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from migrator.autopilot.etcd import Settings
from snapshotd.api.errors import BadConfig
from snapshotd.api.new_files import NewFile, replace_all

FILE = "etcd.json"


def of_folder(folder: Path) -> Settings | None:
    """None: the state is not shared."""
    try:
        content = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadConfig(f"{folder / FILE} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(content, type=Settings, dec_hook=lambda kind, value: kind(value))
    except msgspec.MsgspecError as error:
        raise BadConfig(
            f"{folder / FILE} is damaged: {error}", remedy="start `migrator autopilot` with --etcd: it writes it anew"
        ) from error


def write(folder: Path, settings: Settings) -> None:
    replace_all([NewFile(folder / FILE, msgspec.json.encode(settings, enc_hook=str), 0o600)])


def remove(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def lost(folder: Path) -> BadConfig:
    return BadConfig(
        f"{folder} has a copy of a state that autopilots share through etcd, and {FILE} is missing there",
        remedy="start `migrator autopilot` with the same --etcd as before, or with `--etcd none` to use this state alone",
    )
