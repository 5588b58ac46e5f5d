"""Adds numbers over gloo, and prints a chain of digests that depends on every sum, one line per step.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is; rank 0 hosts the store. Every step is also appended
to the file --witness, as in chain.py. The job ends after the step in which rank 0 has seen the file --until.
"""

import argparse
import hashlib
import itertools
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--until", required=True)
parser.add_argument("--witness", default=os.devnull)
parser.add_argument("--pace-s", type=float, default=0.1)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
state = hashlib.sha256(b"%d" % rank).digest()
for step in itertools.count():
    mine = int.from_bytes(state[:4], "big")
    summed = torch.tensor([mine, int(rank == 0 and os.path.exists(options.until))])
    dist.all_reduce(summed)
    state = hashlib.sha256(state + b"%d" % summed[0].item()).digest()
    with open(options.witness, "a") as witness:
        witness.write(f"{step}\n")
    print("step", step, state.hex()[:16], flush=True)
    if summed[1].item():
        break
    time.sleep(options.pace_s)
dist.barrier()
print("DONE", flush=True)
dist.destroy_process_group()
