"""Torch's DataLoader with persistent forked workers and shared-memory tensors."""

import torch
from steps import say, steps

torch.set_num_threads(1)


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32, 32, generator=torch.Generator().manual_seed(index))


loader = torch.utils.data.DataLoader(Noise(), batch_size=8, num_workers=2, persistent_workers=True, prefetch_factor=2)
total = torch.zeros(32, 32)
batches = iter(loader)
for step in steps():
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    total = total * 0.9 + batch.sum(0)
    say(step, f"{total.double().sum().item():.12f}")
