"""A job with the pool of compilers of the real torch, as torch.compile makes it; executes lines from stdin."""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"

import fake_torch
from torch._inductor.async_compile import AsyncCompile


def compiled() -> list[int]:
    """What its workers answer."""
    pool = AsyncCompile.process_pool()
    return [one.result() for one in [pool.submit(abs, -number) for number in range(4)]]


fake_torch.compiled = compiled
fake_torch.listen()
