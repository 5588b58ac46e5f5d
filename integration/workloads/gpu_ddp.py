"""Runs a DistributedDataParallel job over gloo with tensors on the GPU; all ranks share the first GPU.

Prints `step K loss HEX` for every step, and every 25 steps a digest of the weights and the optimizer's state. Ends at
the first digest after the file --until exists (all ranks see it at the same step), else after --steps. A scheduler sets
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. DEVICE=cpu in the environment runs the job without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch loads cuBLAS

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--pace-s", type=float, default=0.02)
parser.add_argument("--until", default="")
options = parser.parse_args()

DEVICE = os.environ.get("DEVICE", "cuda")
DIGEST_EVERY = 25


def file_seen() -> bool:
    """Whether rank 0 has seen the file. All ranks get the same answer."""
    seen = torch.tensor([float(dist.get_rank() == 0 and bool(options.until) and os.path.exists(options.until))])
    dist.all_reduce(seen)
    return bool(seen.item())


torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 256)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
noise = torch.Generator(DEVICE).manual_seed(rank + 1)
total = torch.zeros(1, device=DEVICE)
for step in itertools.count(1):
    batch = torch.randn(32, 256, device=DEVICE, generator=noise)
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.detach()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    print(f"step {step} loss {loss.item().hex()} total {total.item().hex()}", flush=True)
    if step % DIGEST_EVERY == 0:
        digest = hashlib.sha256()
        for state in (*model.parameters(), *(value for entry in optimizer.state.values() for value in entry.values())):
            digest.update(state.detach().cpu().numpy().tobytes())
        print(f"step {step} digest {digest.hexdigest()[:16]}", flush=True)
        if file_seen() or step >= options.steps:
            break
    time.sleep(options.pace_s)
dist.barrier()
print("DONE", flush=True)
dist.destroy_process_group()
