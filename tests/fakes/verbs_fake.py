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

#: After MAKE_DEVICES: the first device is in /sys/class as well, as a PCI device of this machine that is no GPU, if there is
#: one. NCCL ends with a segmentation fault if it has no PCI path.
MAKE_SYSFS = f"""
set -e
for pci in /sys/bus/pci/devices/*; do
  case $(cat "$pci/class") in 0x03*) ;; *) other=$pci ;; esac
done
classes={FOLDER}/.class
cp -dR /sys/class "$classes" 2>/dev/null || :
mkdir -p "$classes/infiniband/fakeib0/ports/1/gid_attrs/types"
echo "RoCE v2" > "$classes/infiniband/fakeib0/ports/1/gid_attrs/types/0"
ln -s "$(readlink -f "${{other:-$pci}}")" "$classes/infiniband/fakeib0/device"
mount --bind "$classes" /sys/class
"""


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


def with_devices(count: int = 2, *, sysfs: bool = False) -> list[str]:
    """The beginning of a command: what follows runs in a mount namespace with so many devices."""
    script = MAKE_DEVICES + (MAKE_SYSFS if sysfs else "") + 'exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(count)]
