"""Runs one NCCL rank alone on its GPU (world size 1): DDP, FSDP2 or a compiled DDP.

In addition to the collectives of DDP or FSDP (FSDP2 omits them for one rank), every step does an all-gather, a
reduce-scatter and an all-reduce of the gradients. The results become part of the next batch, so each bit of a loss
depends on every collective before it. Prints `step K loss HEX …`, with digests of weights, optimizer and random numbers
every --digest-every steps. After the first step, which loads and compiles everything, it waits for the file --go. Ends
at the first digest at which the file --until exists, else after --steps.

DEVICE=cpu in the environment runs it on gloo. Exits with 77 and a line `SKIP reason` where torch.compile does not work.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import time
from collections.abc import Iterable
from datetime import timedelta

# Not in /tmp, which is private to a node: the moved run uses the compiled kernels of the undisturbed run.
os.environ.update(  # before torch loads NCCL, cuBLAS and its compiler
    {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_DEBUG": "WARN",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": os.path.abspath(f"{__file__}/../../.work/gpu-nccl/inductor"),
        "TRITON_CACHE_DIR": os.path.abspath(f"{__file__}/../../.work/gpu-nccl/triton"),
        **os.environ,
    }
)

import torch
import torch._inductor.config
import torch.distributed as dist
from ballast import Ballast  # type: ignore[import-not-found]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
SKIPPED = 77
WIDTH, BATCH = 128, 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--kind", choices=["ddp", "fsdp", "compile"], required=True)
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--pace-s", type=float, default=0.03)
parser.add_argument("--digest-every", type=int, default=20)
parser.add_argument("--go", default="", help="train on when this file exists")
parser.add_argument("--until", default="", help="end at the first digest once this file exists")
parser.add_argument("--held-mib", type=int, default=64 if ON_GPU else 1, help="so much more on the device")
options = parser.parse_args()


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor: all of it, because there is one rank."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(local(tensor).cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


class Training:
    def __init__(self) -> None:
        blocks = [torch.nn.Linear(WIDTH, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Dropout(0.1)]
        self.plain = torch.nn.Sequential(*blocks, torch.nn.Linear(512, WIDTH)).to(DEVICE)
        self.model = self.plain
        if options.kind == "fsdp":
            mesh = init_device_mesh(DEVICE, (1,))
            for layer in (self.plain[0], self.plain[4]):
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(self.plain, mesh=mesh)
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(self.plain)
        self.compiled = options.kind == "compile"
        if self.compiled:
            self.model = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-3)
        self.noise = torch.Generator(DEVICE).manual_seed(1)
        self.total = torch.zeros((), device=DEVICE)
        self.ballast = Ballast(options.held_mib, DEVICE)

    def step(self) -> str:
        batch = torch.randn(BATCH, WIDTH, device=DEVICE, generator=self.noise) + 1e-3 * self.total
        loss = ((self.model(batch) - batch) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        gradients = torch.cat([local(each.grad).flatten() for each in self.plain.parameters()])
        gathered, scattered = torch.empty_like(gradients), torch.empty_like(gradients)
        dist.all_gather_into_tensor(gathered, gradients)
        dist.reduce_scatter_tensor(scattered, gathered)
        self.total = scattered.abs().mean()
        dist.all_reduce(self.total)
        return f"loss {loss.item().hex()} total {self.total.item().hex()} held {self.ballast.turn()}"

    def said(self) -> str:
        states = (state[name] for state in self.optimizer.state.values() for name in sorted(state))
        numbers = [torch.get_rng_state(), self.noise.get_state()] + ([torch.cuda.get_rng_state()] if ON_GPU else [])
        return f"weights {digest(self.plain.parameters())} optimizer {digest(states)} random {digest(numbers)}"


def first_step(training: Training) -> str:
    """Runs the first step of a compiled model. Skips if the compiler does not work; the plain model has worked before."""
    if not training.compiled:
        return training.step()
    training.plain(torch.zeros(BATCH, WIDTH, device=DEVICE))
    try:
        return training.step()
    except Exception as error:  # noqa: BLE001 - a missing compiler, header or triton, each with its own exception
        say(f"SKIP torch.compile: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise SystemExit(SKIPPED) from None


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if hasattr(torch._inductor.config, "deterministic"):  # otherwise a race between kernels may decide the last bits
        torch._inductor.config.deterministic = True
    device = torch.device(DEVICE, 0) if ON_GPU else None
    if ON_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=150), device_id=device)
    training = Training()
    say(f"step 1 {first_step(training)}")
    while options.go and not os.path.exists(options.go):
        time.sleep(0.01)
    for step in itertools.count(2):
        time.sleep(options.pace_s)
        say(f"step {step} {training.step()}")
        if step % options.digest_every == 0:
            say(f"step {step} digest {training.said()}")
            if step >= options.steps or (options.until and os.path.exists(options.until)):
                break
    say("DONE")
    dist.destroy_process_group()


main()
