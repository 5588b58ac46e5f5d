"""Builds the fake libibverbs once for all tests, and starts programs that see RDMA devices in a /dev of their own."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "verbs"
FOLDER = "/dev/infiniband"

#: Covers the folder with an empty one, in which each device is a file of one page. $1 is the number of devices.
MAKE_DEVICES = f"""
set -e
mkdir -p {FOLDER}
mount -t tmpfs -o mode=0755 none {FOLDER}
count=$1
shift
while [ "$count" -gt 0 ]; do
  count=$((count - 1))
  truncate -s 4096 {FOLDER}/uverbs$count
  chmod 666 {FOLDER}/uverbs$count
done
"""

#: With these the real NCCL uses the first device, and no device memory. NCCL_GIN_TYPE: 2.28.7 to 2.28.9 end with a
#: segmentation fault if there are RDMA devices of which none is an mlx5 (github.com/NVIDIA/nccl/pull/1881). They first try
#: the kind of device API that only mlx5 has, and then use the pointer -1 instead of the kind that all have, which is type 2.
REAL_NCCL = {
    "NCCL_NET": "IB",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": "fakeib0",
    "NCCL_IB_GID_INDEX": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_GIN_TYPE": "2",
}


@functools.cache
def build(sanitizer: str = "") -> Path:
    """Returns the folder with libibverbs.so.1, libibverbs.so and libforeign.so, a library that opens a device itself."""
    folder = SOURCES / "build" / (sanitizer or "plain")
    command: list[str | Path] = ["make", "-s", "-C", SOURCES, f"BUILD={folder}", f"SANITIZE={sanitizer}"]
    with (SOURCES / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def with_devices(count: int = 2) -> list[str]:
    """The beginning of a command: what follows runs in a mount namespace with so many devices."""
    script = MAKE_DEVICES + 'exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(count)]
