"""Two ranks made by mp.spawn, one of which is not even a process of its own to the outside: the whole tree moves."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--pace-s", type=float, default=0.0)
options = parser.parse_args()


def train(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    noise = torch.Generator().manual_seed(rank)
    total = torch.zeros(1024)
    for step in range(options.steps):
        batch = torch.randn(1024, generator=noise)
        dist.all_reduce(batch)
        total = total * 0.9 + batch
        if rank == 0:
            print(f"step {step} {total.double().sum().item():.12f}", flush=True)
        time.sleep(options.pace_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29444")
    mp.spawn(train, args=(2,), nprocs=2)
    print("DONE", flush=True)
