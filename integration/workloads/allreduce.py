"""Runs all-reduces of 64 KiB to 8 MiB over gloo without a pause, so that the sockets' queues are full at any time."""

import argparse
import hashlib
import itertools
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--until", default="", help="go on until this file exists, instead of for so many steps")
options, _ = parser.parse_known_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
noise = torch.Generator().manual_seed(7)
digest = hashlib.sha256()
last = sys.maxsize if options.until else options.steps
for step in itertools.count():
    if options.until and step % 8 == 0:
        seen = torch.tensor([int(rank == 0 and os.path.exists(options.until))])
        dist.all_reduce(seen)
        last = step if seen.item() else last
    if step >= last:
        break
    count = (64 << 10 << (step % 8)) // 8
    tensor = torch.randint(0, 1 << 40, (count,), generator=noise) + rank
    expected = (tensor - rank) * world + sum(range(world))
    dist.all_reduce(tensor)
    if not torch.equal(tensor, expected):
        print(f"WRONG step {step}", flush=True)
        raise SystemExit(1)
    digest.update(tensor[:512].numpy().tobytes())
    print(f"step {step} {count} {digest.hexdigest()[:16]}", flush=True)
dist.barrier()
print("DONE", flush=True)
dist.destroy_process_group()
