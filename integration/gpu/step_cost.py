"""Measures what the shim costs a job per step while no rank moves: `python3 -m integration.gpu.step_cost`.

The same job runs without a shim, with the shim that leaves device memory to the driver, and with the one that backs it.
The runs alternate, so that other load affects all alike. They are done with torch's caching allocator, as in real jobs,
and without it: then every tensor is a cudaMalloc and a cudaFree, which is the worst case for backing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from integration.gpu.gpu_jobs import OUT, ROOT, TRAIN, why_not

WAYS = {"no shim": "", "driver": "libsnapshim.so", "offload": "libsnapshim-offload.so"}
#: Warm-up steps, not counted: kernels are loaded and allocators filled.
WARM_UP_STEPS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cached", action="store_true", help="with torch's caching allocator alone")
    options = parser.parse_args(arguments)
    if why_not():
        sys.exit(f"step_cost: {why_not()}")
    flags = ["--gib", str(options.gib), "--digest-every", "1000000000", "--pace-s", "0", "--streams"]
    jobs = {"caching allocator": {}, "no cache": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
    if options.cached:
        del jobs["no cache"]
    lines, results = (
        ["| ms per step | no shim | driver | offload | offload ÷ no shim |", "| --- | --- | --- | --- | --- |"],
        {},
    )
    for name, environment in jobs.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, library in WAYS.items():
                found[way].append(step_s(flags, options.steps, library, environment))
        best = {way: min(values) for way, values in found.items()}
        ratio = statistics.median(a / b for a, b in zip(found["offload"], found["no shim"], strict=True))
        cells = [f"{best[way] * 1000:.3f}" for way in WAYS]
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.3f} |")
        results[name] = found
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "step-cost.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(lines))
    return 0


def step_s(flags: Sequence[str], steps: int, library: str, environment: dict[str, str]) -> float:
    """Returns the seconds of one step, after the warm-up."""
    command = [sys.executable, TRAIN, *flags]
    preload = {"LD_PRELOAD": str(ROOT / "shim" / "lib" / library)} if library else {}
    began = 0.0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment, **preload}
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith(f"step {WARM_UP_STEPS} "):
                began = time.monotonic()
            if line.startswith(f"step {WARM_UP_STEPS + steps} "):
                job.kill()
                return (time.monotonic() - began) / steps
    raise RuntimeError(f"{' '.join(command)} with {library or 'no shim'} ended with {job.returncode}")


if __name__ == "__main__":
    sys.exit(main())
