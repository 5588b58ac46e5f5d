"""Runs two ranks with mp.spawn. They cannot be told apart from outside, so the whole tree moves. Every sum is checked."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--until", default="", help="a file: the pace is kept until it exists")
options = parser.parse_args()


def train(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    noise = [torch.Generator().manual_seed(number) for number in range(world)]
    for step in range(options.steps):
        batches = [torch.randint(0, 1 << 40, (4096,), generator=generator) for generator in noise]
        total = batches[rank].clone()
        dist.all_reduce(total)
        assert torch.equal(total, sum(batches)), f"rank {rank}: the sum of step {step} is wrong"
        if rank == 0:
            print(f"step {step} {total.sum().item()}", flush=True)
        time.sleep(0 if os.path.exists(options.until) else options.pace_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29444")
    mp.spawn(train, args=(2,), nprocs=2)
    print("DONE", flush=True)
