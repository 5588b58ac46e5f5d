"""Runs a DistributedDataParallel job over gloo. Every rank prints its losses with all digits.

torchrun or `migrator lab run` set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without torchrun rank 0 hosts the
store. With --until FILE the job ends ten steps after that file exists. It creates a new group as soon as FILE.group or
FILE exists. With --fail RANK that rank raises once FILE exists, or at the step that FILE.fail names. With --checkpoint FILE
it saves its state as training scripts do, and continues from there when it is started again.
"""

import argparse
import itertools
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pace-s", type=float, default=0.02)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--frozen-mib", type=int, default=0, help="weights that are not trained")
parser.add_argument("--late-group-at", type=int, default=-1, help="the step at which a new group is made")
parser.add_argument("--until", default="", help="train until this file exists, instead of for so many steps")
parser.add_argument("--witness", default="", help="append each step to this file, which is opened by name every time")
parser.add_argument("--fail", type=int, default=-1, help="the rank that raises")
parser.add_argument("--ballast-mib", type=int, default=0, help="more state, of which a part changes in each step")
parser.add_argument("--checkpoint", default="", help="save the state here, with .RANK added, and continue from it")
parser.add_argument("--checkpoint-at", type=int, default=40, help="the step after which it is saved")
parser.add_argument("--log", default="", help="append the lines to this file too, which stays open; .RANK is added")
options = parser.parse_args()
log = open(f"{options.log}.{os.environ['RANK']}", "a") if options.log else None  # noqa: SIM115


def say(text: str) -> None:
    """Prints a line in one write: two workers of one torchrun share a stdout, which is unbuffered (-u)."""
    print(f"{text}\n", end="", flush=True)
    if log is not None:
        print(text, file=log, flush=True)


def witness(step: int, loss: float) -> None:
    if options.witness:
        with open(options.witness, "a") as file:
            file.write(f"{step} {loss:.12f}\n")


def files_seen() -> tuple[bool, bool]:
    """Whether rank 0 has seen the files that request a new group, and the end. All ranks get the same answer in a step."""
    names = (f"{options.until}.group", options.until) if dist.get_rank() == 0 else ()
    seen = torch.tensor([float(os.path.exists(name)) for name in names] or [0.0, 0.0])
    dist.all_reduce(seen)
    return bool(seen.any()), bool(seen[1])


def must_fail(step: int) -> bool:
    try:
        with open(f"{options.until}.fail") as file:
            return step >= int(file.read())
    except (FileNotFoundError, ValueError):  # it is being written
        return False


def save(step: int, *state: Any) -> None:
    """Complete or not at all."""
    model, optimizer, noise, ballast = state
    path = f"{options.checkpoint}.{dist.get_rank()}"
    torch.save([step, model.state_dict(), optimizer.state_dict(), noise.get_state(), ballast], f"{path}.new")
    os.rename(f"{path}.new", path)


def load(*state: Any) -> int:
    """The next step."""
    path = f"{options.checkpoint}.{dist.get_rank()}"
    if not options.checkpoint or not os.path.exists(path):
        return 0
    model, optimizer, noise, ballast = state
    step, saved_model, saved_optimizer, saved_noise, saved_ballast = torch.load(path)
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_optimizer)
    noise.set_state(saved_noise)
    for own, other in zip(ballast, saved_ballast, strict=True):
        own.copy_(other)
    return int(step)


@record
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 64)
    )
    if options.frozen_mib:
        weights = torch.rand(options.frozen_mib << 18, generator=torch.Generator().manual_seed(1))
        layers.register_parameter("frozen", torch.nn.Parameter(weights, requires_grad=False))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(rank + 1)
    ballast = [torch.randn(1 << 18, generator=noise) for _ in range(options.ballast_mib)]
    first = load(model, optimizer, noise, ballast)
    group, group_at, steps = None, options.late_group_at, options.steps
    if options.until:
        group_at, steps = -1, sys.maxsize
    for step in itertools.count(first):
        if options.until and steps == sys.maxsize:
            wants_group, ends = files_seen()
            group_at = step if wants_group and group is None else -1
            steps = step + 10 if ends else steps
            if options.fail == rank and (ends or must_fail(step)):
                raise ValueError(f"rank {rank} was told to fail")
        if step >= steps:
            break
        batch = torch.randn(32, 64, generator=noise)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ballast:
            ballast[step % len(ballast)].add_(loss.detach())
        if options.checkpoint and step == options.checkpoint_at:
            save(step + 1, model, optimizer, noise, ballast)
        witness(step, loss.item())
        if step == group_at:
            group = dist.new_group(list(range(world)))
        if group is not None:
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
            say(f"step {step} loss {loss.item():.12f} sum {total.item():.12f}")
        else:
            say(f"step {step} loss {loss.item():.12f}")
        time.sleep(options.pace_s)
    dist.barrier()
    print("DONE", flush=True)
    dist.destroy_process_group()


main()
