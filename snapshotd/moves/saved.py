"""How memory of a rank that was snapshotted got into its image, while the rank ran again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Late(StrEnum):
    """What is saved late, by the name of the part that the driver is told."""

    DEVICE = "save"
    HOST = "save-host"


@dataclass(frozen=True)
class Saved:
    bytes: int
    seconds: float
    failure: str = ""  # empty: all of it is in the image
