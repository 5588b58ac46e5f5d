"""How the device memory of a rank that was snapshotted got into its image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    bytes: int
    seconds: float  # while the rank ran again
    failure: str = ""  # empty: all of it is in the image
