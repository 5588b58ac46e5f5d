"""Adds device memory to jobs with small models, enough to be offloaded. Every step changes all of it."""

from __future__ import annotations

import torch


class Ballast:
    """`turn` returns a number that depends on every bit of the memory, and so on all previous turns."""

    def __init__(self, mib: int, device: str) -> None:
        self.held = torch.arange(mib << 17, device=device)  # of 8 bytes each

    def turn(self) -> int:
        self.held.mul_(6364136223846793005).add_(1442695040888963407)
        return int(self.held.sum().item())
