"""Changes to criu's image files on the target, before the restore, with pycriu's own codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycriu import images


def mend(folder: Path) -> None:
    """Mends what criu records but would not restore as it was."""
    path = folder / "files.img"
    with path.open("rb") as file:
        table = images.load(file)
    for entry in table["entries"]:
        match entry["type"]:
            case "REG":
                _forget_size(entry["reg"])
            case "TIMERFD":
                _rearm(entry["tfd"])
    with path.open("wb") as file:
        images.dump(table, file)


def _forget_size(file: dict[str, Any]) -> None:
    """A log that others go on appending to is no obstacle. That files are the same on both nodes is preflight's question."""
    file.pop("size", None)


def _rearm(timer: dict[str, Any]) -> None:
    """A periodic timerfd that has expired and was not read yet: the kernel shows no time left, and criu would restore that
    as a timer that is off. One nanosecond left is the same timer, expired, and still periodic."""
    periodic = int(timer["isec"]) or int(timer["insec"])
    if periodic and not int(timer["vsec"]) and not int(timer["vnsec"]):
        timer["vnsec"] = 1
