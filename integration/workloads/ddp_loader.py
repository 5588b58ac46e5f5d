"""Runs a DDP job that gets batches from DataLoader workers through shared memory and writes a checkpoint at every step.

Writing the checkpoint takes most of a step, so a move almost always interrupts it. Ends ten steps after --until exists,
or after --steps.
"""

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--until", default="")
parser.add_argument("--checkpoints", required=True, help="the folder that they are written to")
options = parser.parse_args()


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ballast = torch.randn(2 << 20)
loader = DataLoader(Noise(), batch_size=16, sampler=range(rank, 1 << 20, world), num_workers=2)
steps, path = (sys.maxsize if options.until else options.steps), f"{options.checkpoints}/rank{rank}.pt"
for step, batch in zip(itertools.count(), loader, strict=False):
    if options.until and steps == sys.maxsize:
        seen = torch.tensor([float(rank == 0 and os.path.exists(options.until))])
        dist.all_reduce(seen)
        steps = step + 10 if seen.item() else steps
    if step >= steps:
        break
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save({"step": step, "model": model.state_dict(), "ballast": ballast}, f"{path}.new")
    os.replace(f"{path}.new", path)
    print(f"step {step} loss {loss.item():.12f}", flush=True)
kept = torch.load(path)
assert kept["step"] == steps - 1, f"{path} is of step {kept['step']}"
assert torch.equal(kept["ballast"], ballast), f"{path} is not what was written"
dist.barrier()
print("DONE", flush=True)
dist.destroy_process_group()
