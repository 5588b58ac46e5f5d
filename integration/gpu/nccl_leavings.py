"""Shows what NCCL keeps in a process when its last communicator is destroyed, for each of its features.

    integration/gpu/run --exec python3 -m integration.gpu.nccl_leavings

For each set of settings a process of its own, without the shim, makes a communicator of world size 1 with torch, reduces,
and destroys it. It lists its threads, descriptors, sockets and mappings before NCCL is initialised, while the communicator is
up, and afterwards. What CUDA itself opens meanwhile is told apart by a first CUDA operation before the first list. A
line of NCCL's log says whether NVLink SHARP was really used: a single GPU may not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OFF = {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
#: Every feature alone, those that are for speed together, and everything.
SETTINGS: dict[str, dict[str, str]] = {
    "all-off": OFF,
    "cumem": OFF | {"NCCL_CUMEM_ENABLE": "1"},
    "cumem-host": OFF | {"NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1"},
    "nvls": OFF | {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"},
    "ras": OFF | {"NCCL_RAS_ENABLE": "1"},
    "performance": OFF | {"NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"},
    "nccl-defaults": {"NCCL_RAS_ENABLE": ""},  # what NCCL does by itself
}
LIMIT_S = 120.0
_ADDRESS = re.compile(r"\S+ \S+ \S+ \S+ \S+\s*(.*)")
#: Settling time after destroy: the kernel lists threads that have just ended for a moment.
SETTLE_S = 5.0


def listed() -> dict[str, dict[str, int]]:
    """How often each kind of thing is there."""
    descriptors, sockets = Counter[str](), Counter[str]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            kind = os.getxattr(link, "system.sockprotoname").rstrip(b"\0").decode()
            sockets[f"{kind}{' listening' if _listening(target) else ''}"] += 1
        else:
            descriptors[re.sub(r"[0-9]{3,}|\[[0-9]+\]", "N", target)] += 1
    names = Counter(
        re.sub(r"[0-9]+", "N", (task / "comm").read_text().strip()) for task in Path("/proc/self/task").iterdir()
    )
    mapped = Counter[str]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _ADDRESS.match(line)
        name = found[1] if found else ""
        if name.startswith(("/dev/", "/memfd", "/SYSV", "anon_inode", "/dmabuf")):
            mapped[re.sub(r"[0-9]{3,}", "N", name)] += 1
    return {
        "threads": dict(names),
        "descriptors": dict(descriptors),
        "sockets": dict(sockets),
        "mappings": dict(mapped),
    }


def _listening(target: str) -> bool:
    inode = target[len("socket:[") : -1]
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[9] == inode and fields[3] == "0A":
                return True
    return False


def be_the_process() -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    tensor = torch.ones(1 << 20, device="cuda")
    tensor.sum().item()
    first = listed()
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    up = listed()
    dist.destroy_process_group()
    until = time.monotonic() + SETTLE_S
    while (after := listed()) != first and time.monotonic() < until:
        time.sleep(0.1)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"RESULT {json.dumps({'nccl': version, 'first': first, 'up': up, 'after': after})}", flush=True)


def more(later: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """What there is more of than before."""
    found = {kind: dict(Counter(later[kind]) - Counter(before[kind])) for kind in later}
    return {kind: things for kind, things in found.items() if things}


def measure(name: str) -> dict[str, Any]:
    """The settings, what NCCL has while a communicator is up, and what is left of it."""
    settings = {key: value for key, value in SETTINGS[name].items() if value}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
    environment = {**inherited, **settings, "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}
    command = [sys.executable, "-m", "integration.gpu.nccl_leavings", "--be-the-process"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    result = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    if result is None:
        raise RuntimeError(f"{name}: the process ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    found = json.loads(result[1])
    log = [line for line in done.stdout.splitlines() if re.search(r"NVLS|RAS|[Cc]u[Mm]em", line)]
    return {
        "settings": settings,
        "nccl": found["nccl"],
        "up": more(found["up"], found["first"]),
        "left": more(found["after"], found["first"]),
        "log": [line[-200:] for line in log[:8]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--be-the-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    if options.be_the_process:
        be_the_process()
        return 0
    for name in options.only:
        print(f"{name}: {json.dumps(measure(name), indent=1)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
