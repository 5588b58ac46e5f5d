"""Trains a GPT on a GPU as common scripts do: torch.compile with its pool of processes, bf16, fused AdamW, a file of tokens.

Prints `step K loss HEX`, all bits of the loss, for every step, and every --digest-every steps digests of its state.
Two runs with the same flags print the same lines; only their length differs: the job ends at the first digest after the file
--until exists, else after --steps. The pool of the compiler lives as long as the job, as it does by default.

DEVICE=cpu in the environment trains a model of one layer without a GPU. Exits with 77 and a line `SKIP reason` where
torch.compile does not work.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch loads cuBLAS

import numpy as np
import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE.startswith("cuda")
SKIPPED = 77
TOKENS = 4 << 20


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    batch: int


#: GPT-2's smallest, 124 million parameters; and one that a core trains.
SHAPE = Shape(12, 12, 768, 1024, 50304, 8) if ON_GPU else Shape(1, 2, 64, 32, 512, 4)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        mixed: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(shape.vocabulary, shape.width),
            nn.Embedding(shape.context, shape.width),
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Data:
    """Batches out of a mapped file, at random places, through pinned memory."""

    def __init__(self, path: str) -> None:
        if not os.path.exists(path):  # the same for everyone, and left behind, as a data set is
            np.random.default_rng(1).integers(0, SHAPE.vocabulary, TOKENS, dtype=np.uint16).tofile(
                f"{path}.{os.getpid()}"
            )
            os.rename(f"{path}.{os.getpid()}", path)
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.places = torch.Generator().manual_seed(2)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.tokens) - SHAPE.context - 1, (SHAPE.batch,), generator=self.places).tolist()
        rows = np.stack([self.tokens[at : at + SHAPE.context + 1].astype(np.int64) for at in starts])
        both = torch.from_numpy(rows)
        if ON_GPU:
            both = both.pin_memory().to(DEVICE, non_blocking=True)
        return both[:, :-1], both[:, 1:]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    sum_ = hashlib.sha256()
    for tensor in tensors:
        sum_.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sum_.hexdigest()[:16]


def say(text: str) -> None:
    print(text, flush=True)


def break_context() -> None:
    """A kernel that reads out of bounds: the CUDA context is lost, and with it all that the process has on the GPU."""
    beyond = torch.zeros(1, device=DEVICE)[torch.tensor([1 << 20], device=DEVICE)]
    say(f"never said: {beyond.item()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--until", default="", help="end at the first digest once this file exists")
    parser.add_argument("--digest-every", type=int, default=50)
    parser.add_argument("--break-file", default="", help="remove this file if it exists, and read beyond a tensor")
    parser.add_argument("--data", required=True, help="file of tokens, which is made if it does not exist")
    options = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    torch._inductor.config.deterministic = True  # otherwise the fastest of several kernels may differ from run to run
    torch.manual_seed(0)
    if not ON_GPU:
        torch.set_num_threads(1)
    plain = Gpt(SHAPE).to(DEVICE)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=ON_GPU)
    model = torch.compile(plain)
    data = Data(options.data)
    for step in itertools.count(1):
        tokens, targets = data.batch()
        try:
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=ON_GPU):
                loss = model(tokens, targets)
            loss.backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            say(f"SKIP torch.compile: {' '.join(str(error).split())[:300]}")
            raise SystemExit(SKIPPED) from None
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        say(f"step {step} loss {float(loss.item()).hex()}")
        if options.break_file and os.path.exists(options.break_file):
            os.unlink(options.break_file)
            break_context()
        if step % options.digest_every == 0:
            state = (one for held in optimizer.state.values() for _, one in sorted(held.items()))
            say(f"digest {step} weights {digest(plain.parameters())} optimizer {digest(state)}")
            if step >= options.steps or (options.until and os.path.exists(options.until)):
                break
        time.sleep(options.pace_s)
    say("DONE")


if __name__ == "__main__":
    main()
