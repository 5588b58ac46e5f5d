"""Runs a deterministic training job on a GPU, with the features of real jobs, each behind a flag.

Prints `step K loss HEX`, all bits of the loss, for every step, and every --digest-every steps digests of the weights,
the optimizer's state, the random number generators and the ballast. Two runs with the same flags print the same lines.
Only their length differs: the job ends at the first digest after the file --until exists, else after --steps.

DEVICE=cpu in the environment runs the same job without a GPU, and without graph and streams. Exits with 77 and a line
`SKIP reason` where torch.compile does not work.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch loads cuBLAS

import torch
import torch._inductor.config
from torch.utils.data import DataLoader, Dataset

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE.startswith("cuda")
WIDTH, BATCH = 512, 64
BLOCK_FLOATS = 64 << 20  # 256 MiB of ballast
SKIPPED = 77

# ---------------------------------------------------------------- the batches


class Noise(Dataset[torch.Tensor]):
    """Items from the worker's random numbers, so that their state has to survive too."""

    def __len__(self) -> int:
        return 40 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH) + index / len(self)


def one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def batches(loader: str) -> Iterator[torch.Tensor]:
    if not loader:
        noise = torch.Generator(DEVICE).manual_seed(1)
        while True:
            yield torch.randn(BATCH, WIDTH, device=DEVICE, generator=noise)
    loads = DataLoader(
        Noise(),
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        num_workers=2,
        persistent_workers=True,
        pin_memory=ON_GPU,
        multiprocessing_context=loader,
        worker_init_fn=one_thread,
    )
    while True:
        for batch in loads:
            yield batch.to(DEVICE, non_blocking=True)


# ---------------------------------------------------------------- concurrent work


class Streams:
    """A ring of streams that wait for each other's events. Their results become part of every batch."""

    def __init__(self, count: int = 3) -> None:
        noise = torch.Generator(DEVICE).manual_seed(2)
        self.weights = torch.randn(1024, 1024, device=DEVICE, generator=noise) / 32
        # Always written in place: a freed block could be allocated again while another stream still reads it.
        self.states = [torch.randn(1024, 1024, device=DEVICE, generator=noise) for _ in range(count)]
        self.room = [torch.empty_like(state) for state in self.states]
        self.streams = [torch.cuda.Stream() for _ in range(count)] if ON_GPU else [None] * count

    def step(self) -> torch.Tensor:
        before: torch.cuda.Event | None = None
        done: list[torch.cuda.Event] = []
        if ON_GPU:
            before = torch.cuda.Event()
            before.record()
        for index, stream in enumerate(self.streams):
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None:
                    stream.wait_event(before)
                for _ in range(4 if ON_GPU else 1):
                    torch.matmul(self.states[index], self.weights, out=self.room[index])
                    torch.tanh(self.room[index], out=self.states[index])
                if stream is not None and done:
                    stream.wait_event(done[-1])
                if index:  # the neighbour of the first stream would be the last one, which is being written meanwhile
                    self.states[index].add_(self.states[index - 1], alpha=0.1)
                if stream is not None:
                    done.append(torch.cuda.Event())
                    done[-1].record(stream)
        for event in done:
            torch.cuda.current_stream().wait_event(event)
        return sum(state[0].mean() for state in self.states)


class Thread(threading.Thread):
    """Launches work on a separate stream, up to four rounds ahead of the training."""

    def __init__(self, seed: int) -> None:
        super().__init__(name=f"launches-{seed}", daemon=True)
        self.noise = torch.Generator(DEVICE).manual_seed(seed)
        self.values: queue.Queue[float] = queue.Queue(4)
        self.ends = threading.Event()

    def run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext():
            state = torch.zeros(512, 512, device=DEVICE)
            while not self.ends.is_set():
                for _ in range(4):
                    state = torch.tanh(state @ state + torch.randn(512, 512, device=DEVICE, generator=self.noise))
                value = state.mean().item()
                while not self.ends.is_set():
                    with contextlib.suppress(queue.Full):
                        self.values.put(value, timeout=0.1)
                        break


# ---------------------------------------------------------------- the training


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        layers = [torch.nn.Linear(WIDTH, 2048), torch.nn.GELU(), torch.nn.LayerNorm(2048), torch.nn.Dropout(0.1)]
        if options.conv:
            layers[:0] = [torch.nn.Unflatten(1, (8, 8, 8)), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Flatten()]
        self.plain = torch.nn.Sequential(*layers, torch.nn.Linear(2048, WIDTH)).to(DEVICE)
        self.model = torch.compile(self.plain) if options.compile else self.plain
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-3)
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.amp)
        # A scale that changes every few steps is state that must survive. By default it changes every 2000 steps.
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=options.amp == "fp16", growth_interval=30)
        self.graph = torch.cuda.CUDAGraph() if options.graph and ON_GPU else None
        self.input = torch.zeros(BATCH, WIDTH, device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        if options.compile:
            self._compile()
        if self.graph is not None:
            self._capture(self.graph)

    def step(self, batch: torch.Tensor) -> float:
        if self.graph is not None:
            self.input.copy_(batch)
            self.graph.replay()
        else:
            self.optimizer.zero_grad()
            self.loss = self._backward(batch)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.loss.item())

    def _backward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=self.amp, enabled=self.amp is not None, cache_enabled=self.graph is None):
            loss = ((self.model(batch) - batch) ** 2).mean()
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Captures forward and backward as one graph, but not the optimizer: the scaler reads the gradients first."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.optimizer.zero_grad()
                self._backward(self.input)
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizer.zero_grad()  # to None: the captured backward allocates gradients in the graph's own memory
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss = self._backward(self.input)

    def _compile(self) -> None:
        """Runs the plain model first, so that a later failure is the compiler's."""
        self.plain(self.input).sum().backward()
        with contextlib.suppress(AttributeError):  # otherwise a race between kernels may decide the last bits
            torch._inductor.config.deterministic = True
        try:
            self._backward(self.input)
        except Exception as error:  # noqa: BLE001 - a missing compiler, header or triton, each with its own exception
            say(f"SKIP torch.compile: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            raise SystemExit(SKIPPED) from None
        self.optimizer.zero_grad()

    def state(self) -> Iterable[torch.Tensor]:
        for state in self.optimizer.state.values():
            yield from (state[name] for name in sorted(state))
        yield torch.tensor(self.scaler.get_scale() if self.scaler.is_enabled() else 0.0)


# ---------------------------------------------------------------- output


def digest(tensors: Iterable[torch.Tensor]) -> str:
    sum_ = hashlib.sha256()
    for tensor in tensors:
        sum_.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sum_.hexdigest()[:16]


def ballast_digest(blocks: list[torch.Tensor]) -> str:
    """Digest of the ballast. Sums integers, so that the order of additions does not matter, by rows, so that positions do."""
    return digest(block.view(torch.int32).view(1024, -1).sum(dim=1, dtype=torch.int64) for block in blocks)


def raw_blocks(mib: int) -> list[torch.Tensor]:
    """Allocates device memory directly with the driver, not through torch or the runtime, and returns it as a tensor."""
    if not mib or not ON_GPU:
        return []
    driver, address, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), mib << 20
    torch.zeros(1, device=DEVICE)  # a context
    if (result := driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))) != 0:
        sys.exit(f"cuMemAlloc of {size} bytes: {result}")

    class Raw:
        __cuda_array_interface__ = {  # noqa: RUF012 - a protocol
            "shape": (size // 4,),
            "typestr": "<f4",
            "data": (address.value, False),
            "version": 3,
        }

    block = torch.as_tensor(Raw(), device=DEVICE)
    return [block.copy_(torch.randn(size // 4, device=DEVICE))]


def random_digest() -> str:
    states = [torch.get_rng_state(), torch.tensor(bytearray(repr(random.getstate()).encode()))]
    return digest([*states, torch.cuda.get_rng_state()] if ON_GPU else states)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pace-s", type=float, default=0.01)
    parser.add_argument("--until", default="", help="end at the first digest once this file exists")
    parser.add_argument("--digest-every", type=int, default=50)
    parser.add_argument(
        "--gib", type=float, default=0.0, help="ballast in device memory, some of it changed every step"
    )
    parser.add_argument(
        "--cached-gib", type=float, default=0.0, help="freed again: the allocator keeps it, for nothing"
    )
    parser.add_argument("--raw-mib", type=int, default=0, help="of the ballast, allocated past torch and the runtime")
    parser.add_argument("--amp", choices=["fp16", "bf16"], default="")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--conv", action="store_true")
    parser.add_argument("--loader", choices=["fork", "spawn"], default="")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--threads", action="store_true")
    options = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    random.seed(0)
    if not ON_GPU:
        torch.set_num_threads(1)
    blocks = [torch.randn(BLOCK_FLOATS, device=DEVICE) for _ in range(round(options.gib * 4))]
    blocks += raw_blocks(options.raw_mib)
    if options.cached_gib:
        del [torch.empty(int(options.cached_gib * (1 << 30)), dtype=torch.uint8, device=DEVICE)][:]
    trainer = Trainer(options)
    streams = Streams() if options.streams else None
    threads = [Thread(seed) for seed in (10, 11, 12)] if options.threads else []
    for thread in threads:
        thread.start()
    loads = batches(options.loader)
    for step in itertools.count(1):
        batch = next(loads)
        if streams is not None:
            batch = batch * (1 + streams.step())
        if threads:
            batch = batch * (1 + sum(thread.values.get() for thread in threads))
        if blocks:
            blocks[step % len(blocks)].mul_(1.0001)
        say(f"step {step} loss {trainer.step(batch).hex()} {random.random().hex()}")
        if step % options.digest_every == 0:
            weights, state = digest(trainer.plain.parameters()), digest(trainer.state())
            say(f"digest {step} weights {weights} optimizer {state} random {random_digest()} {ballast_digest(blocks)}")
            if step >= options.steps or (options.until and os.path.exists(options.until)):
                break
        time.sleep(options.pace_s)
    for thread in threads:
        thread.ends.set()
        thread.join()
    say("DONE")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
