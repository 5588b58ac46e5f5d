"""Whether the loader would find the driver's libraries, without loading them: the daemon must never do that."""

from __future__ import annotations

import os
from pathlib import Path

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"

_CACHE = Path("/etc/ld.so.cache")
_DEFAULT_DIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


def found(name: str, library_dir: str) -> bool:
    """Whether `name` is in `library_dir` or where the loader looks."""
    dirs = [library_dir, *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_DEFAULT_DIRS]
    if any(folder and os.path.exists(os.path.join(folder, name)) for folder in dirs):
        return True
    try:
        cache = _CACHE.read_bytes()
    except OSError:
        return False
    # Zero-terminated strings; a name is mostly stored as the end of its path alone.
    return any(before + name.encode() + b"\0" in cache for before in (b"/", b"\0"))


def driver_loaded() -> bool:
    """Whether the kernel has NVIDIA's driver, so that GPUs are to be expected."""
    return os.path.exists("/dev/nvidiactl")
