"""Device memory that is large enough to be parked, in jobs whose models are small: every step changes all of it."""

from __future__ import annotations

import torch


class Ballast:
    """The number that `turn` returns depends on every bit that is held, and so on all turns before."""

    def __init__(self, mib: int, device: str) -> None:
        self.held = torch.arange(mib << 17, device=device)  # of 8 bytes each

    def turn(self) -> int:
        self.held.mul_(6364136223846793005).add_(1442695040888963407)
        return int(self.held.sum().item())
