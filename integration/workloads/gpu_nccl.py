"""Runs two NCCL ranks that share the first GPU: first DDP, then only operations that work after a move on a shared GPU.

A rank that the CUDA driver has restored dies when its NCCL kernel is time-sliced with that of its peer. So after
--ddp-steps steps with all-reduce the ranks take turns: gradients go to rank 0 by `dist.reduce` and come back by
`dist.broadcast`. The receiver reports that its GPU is idle, the sender launches its kernel and waits for its end, and
then the receiver launches its own. Neither has other work on the GPU. This is done on the default group (the
gradients), on a split and on a sub-group (known numbers).

Prints `step K …` for every step: all bits of the loss, and digests of weights, optimizer and random numbers. Between
the two parts it does all-reduces that change nothing, until the file --turns exists. Ends before the step at which the
file --until exists, else after --steps. A scheduler sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. DEVICE=cpu runs
the job on gloo, without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

os.environ.update(  # before torch loads NCCL and cuBLAS
    {
        "NCCL_HOSTID": f"rank-{os.environ['RANK']}",  # otherwise NCCL refuses two ranks on one GPU
        "NCCL_RUNTIME_CONNECT": "0",  # all connections are made with the communicator, none during a turn
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_DEBUG": "WARN",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **os.environ,
    }
)

import torch
import torch.distributed as dist
from ballast import Ballast  # type: ignore[import-not-found]

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
#: Longer than any move. A rank that waits longer fails with a message instead of hanging.
PATIENCE_S = 150.0
COUNT = 1024
ROOT, MOVER = 0, 1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ddp-steps", type=int, default=8)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--pace-s", type=float, default=0.1)
parser.add_argument(
    "--margin-s", type=float, default=0.05, help="from a sender that has finished, or had 4 times that, to its receiver"
)
parser.add_argument("--turns", default="", help="take turns from the moment on that this file exists")
parser.add_argument("--until", default="", help="end when this file exists")
parser.add_argument("--held-mib", type=int, default=64 if ON_GPU else 1, help="so much more on the device")
options = parser.parse_args()


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


def idle() -> None:
    """Waits until this rank has no work left on the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()


class Turns:
    """Messages between the two ranks through the store; each key is used once."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.number = store, 0

    def tell(self, word: str, text: str = "x") -> None:
        self.store.set(word, text)

    def hear(self, word: str) -> str:
        """Waits for a message. It polls, because a blocking request would occupy the connection that torch's threads use."""
        ends = time.monotonic() + PATIENCE_S
        while not self.store.check([word]):
            if time.monotonic() > ends:
                say(f"WRONG waited {PATIENCE_S:.0f} s for {word}")
                os._exit(1)
            time.sleep(0.001)
        return bytes(self.store.get(word)).decode()

    def agree(self, what: str, decide: Callable[[], str]) -> str:
        """Returns the decision of rank 0 on both ranks."""
        if RANK == ROOT:
            self.tell(what, decide())
        return self.hear(what)

    def pass_on(self, sender: int, launch: Callable[[], dist.Work]) -> None:
        """Runs one operation in one direction. Returns when both ranks are idle again."""
        self.number += 1
        idle()
        if sender == RANK:
            self.hear(f"ready-{self.number}")
            work = launch()
            ends = time.monotonic() + 4 * options.margin_s
            while not work.is_completed() and time.monotonic() < ends:
                time.sleep(0.001)
            self.tell(f"sent-{self.number}")
            work.wait()
            idle()
            self.hear(f"received-{self.number}")
        else:
            self.tell(f"ready-{self.number}")
            self.hear(f"sent-{self.number}")
            time.sleep(options.margin_s)
            launch().wait()
            idle()
            self.tell(f"received-{self.number}")

    def there_and_back(self, tensor: torch.Tensor, group: dist.ProcessGroup, at_root: Callable[[], object]) -> None:
        """Sums both ranks' tensors at rank 0, applies `at_root` there, and broadcasts the result."""
        self.pass_on(MOVER, lambda: dist.reduce(tensor, ROOT, group=group, async_op=True))
        if RANK == ROOT:
            at_root()
        self.pass_on(ROOT, lambda: dist.broadcast(tensor, ROOT, group=group, async_op=True))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def expect(what: str, tensor: torch.Tensor, number: int) -> None:
    if not bool((tensor == number).all().item()):
        say(f"WRONG {what}: {tensor.unique().tolist()[:5]}, not {number}")
        os._exit(1)


def make_groups(store: dist.Store) -> list[dist.ProcessGroup]:
    """Creates the default group, a split of it, and a sub-group."""
    limit = timedelta(seconds=PATIENCE_S)
    device = torch.device(DEVICE, 0) if ON_GPU else None
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("torch", store), rank=RANK, world_size=WORLD, timeout=limit, device_id=device
    )
    everyone = list(range(WORLD))
    split = dist.split_group(split_ranks=[everyone], timeout=limit) if ON_GPU else dist.new_group(everyone, limit)
    return [dist.group.WORLD, split, dist.new_group(everyone, limit)]


class Training:
    def __init__(self) -> None:
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)]
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.noise = torch.Generator(DEVICE).manual_seed(RANK + 1)
        self.ballast = Ballast(options.held_mib, DEVICE)
        self.flat = torch.zeros(sum(each.numel() for each in self.model.parameters()), device=DEVICE)

    def backward(self) -> torch.Tensor:
        batch = torch.randn(32, 64, device=DEVICE, generator=self.noise)
        loss = ((self.model(batch) - batch) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def with_all_reduce(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        return float(loss.item())

    def in_turns(self, turns: Turns, group: dist.ProcessGroup) -> float:
        """Data-parallel training by hand: no kernel of one rank ever waits for a kernel of the other."""
        with self.model.no_sync():
            loss = self.backward()
        gradients = [each.grad for each in self.model.parameters()]
        torch.cat([each.flatten() for each in gradients], out=self.flat)
        turns.there_and_back(self.flat, group, lambda: self.flat.div_(WORLD))
        for gradient, part in zip(gradients, self.flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        return float(loss.item())

    def said(self) -> str:
        states = (state[name] for state in self.optimizer.state.values() for name in sorted(state))
        numbers = [torch.get_rng_state(), torch.tensor(bytearray(repr(random.getstate()).encode()))]
        numbers += [self.noise.get_state()] + ([torch.cuda.get_rng_state()] if ON_GPU else [])
        weights, optimizer = digest(self.model.parameters()), digest(states)
        numbers_said = f"random {digest(numbers)} {random.random().hex()}"
        return f"weights {weights} optimizer {optimizer} {numbers_said} held {self.ballast.turn()}"


def all_reduces(groups: list[dist.ProcessGroup], number: int) -> None:
    for group in groups:
        tensor = torch.full((COUNT,), number * (RANK + 1), device=DEVICE)
        dist.all_reduce(tensor, group=group)
        expect("all-reduce", tensor, number * WORLD * (WORLD + 1) // 2)


def numbers_in_turns(turns: Turns, group: dist.ProcessGroup, number: int) -> None:
    tensor = torch.full((COUNT,), number * (RANK + 1), device=DEVICE)

    def at_root() -> None:
        expect("reduce", tensor, number * WORLD * (WORLD + 1) // 2)
        tensor.fill_(7 * number + 1)

    turns.there_and_back(tensor, group, at_root)
    expect("broadcast", tensor, 7 * number + 1)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if ON_GPU:
        torch.cuda.set_device(0)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=RANK == ROOT,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    turns = Turns(dist.PrefixStore("turns", store))
    groups = make_groups(store)
    training = Training()
    for step in range(1, options.ddp_steps + 1):
        loss = training.with_all_reduce()
        all_reduces(groups, step)
        say(f"step {step} loss {loss.hex()} {training.said()}")

    def goes_on(what: str, file: str, *, last: bool) -> bool:
        return turns.agree(what, lambda: "ends" if last or (file and os.path.exists(file)) else "goes on") == "goes on"

    for rounds in itertools.count(1):
        if not goes_on(f"all-reduce-{rounds}", options.turns, last=not options.turns):
            break
        all_reduces(groups, rounds)
        say(f"all-reduce {rounds}")
        time.sleep(options.pace_s)
    for step in itertools.count(options.ddp_steps + 1):
        if not goes_on(f"step-{step}", options.until, last=step > options.steps):
            break
        loss = training.in_turns(turns, groups[0])
        for group in groups[1:]:
            numbers_in_turns(turns, group, step)
        say(f"step {step} loss {loss.hex()} {training.said()}")
        time.sleep(options.pace_s)
    idle()
    say("DONE")
    dist.destroy_process_group()
    if RANK == ROOT:  # it hosts the store
        turns.hear("over")
    else:
        turns.tell("over")
    sys.stdout.flush()


main()
