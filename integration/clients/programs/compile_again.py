"""Compiles a function with torch.compile at the start, and one more for each file NUMBER.go that appears in a directory.

The compiler's cache is where it is by default, in the node's own /tmp. On a GPU Triton compiles, which has another cache.
Prints a line for each step and for each compilation.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compiling processes: this one does it
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)

import torch


def compiled(number: int, device: str) -> float:
    """The value of a function that is compiled now. Its constant makes it one that no cache knows yet."""
    constant = time.time_ns() % 1_000_003 / 1000.0
    data = torch.arange(64, dtype=torch.float32, device=device)
    function = torch.compile(lambda x: torch.cos(x) * constant + number, backend="inductor")
    expected = torch.cos(data) * constant + number
    return float((function(data) - expected).abs().max() / constant)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", type=Path, required=True)
    parser.add_argument("--end-file", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"compiled 0: {compiled(0, args.device) < 1e-5}", flush=True)
    number, step = 1, 0
    while not args.end_file.exists():
        print(f"step {step}", flush=True)
        step += 1
        if (args.orders / f"{number}.go").exists():
            torch._dynamo.reset()
            print(f"compiled {number}: {compiled(number, args.device) < 1e-5}", flush=True)
            number += 1
        time.sleep(0.05)
    print("DONE", flush=True)


main()
