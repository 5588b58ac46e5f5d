"""A DistributedDataParallel job over gloo: every rank prints its losses, every digit of them.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun or `migrator lab run` set them. Rank 0 hosts the store.
"""

import argparse
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pace-s", type=float, default=0.02)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--late-group-at", type=int, default=-1, help="the step at which a new group is made")
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 64))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
noise = torch.Generator().manual_seed(rank + 1)
group = None
for step in range(options.steps):
    batch = torch.randn(32, 64, generator=noise)
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == options.late_group_at:
        group = dist.new_group(list(range(world)))
    if group is not None:
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        print(f"step {step} loss {loss.item():.12f} sum {total.item():.12f}", flush=True)
    else:
        print(f"step {step} loss {loss.item():.12f}", flush=True)
    time.sleep(options.pace_s)
dist.barrier()
print("DONE", flush=True)
dist.destroy_process_group()
