"""What came of sending."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """Bytes of the stripes, and how they travelled; what went again over another connection counts again there."""

    bytes: int
    sent: int
    zero: int
    same: int
    seconds: float  # from the first byte that could be sent to the target's last word
