"""Finds the driver without loading its libraries, which the daemon must never do."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from snapshotd.proc.comm import thread_names
from snapshotd.proc.fd import read_links

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"

_CACHE = Path("/etc/ld.so.cache")
_CONTROL, _MAJOR = "/dev/nvidiactl", 195
_DRIVER_THREAD = re.compile(r"cuda-EvtHandlr|cuda\d{11}")
_DEFAULT_DIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


def found(name: str, library_dir: str) -> bool:
    """Whether `name` is in `library_dir` or in the loader's search path."""
    dirs = [library_dir, *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_DEFAULT_DIRS]
    if any(folder and os.path.exists(os.path.join(folder, name)) for folder in dirs):
        return True
    try:
        cache = _CACHE.read_bytes()
    except OSError:
        return False
    # Zero-terminated strings; a name is usually stored only as the end of its path.
    return any(before + name.encode() + b"\0" in cache for before in (b"/", b"\0"))


def driver_loaded() -> bool:
    """Whether the kernel has loaded NVIDIA's driver, so that GPUs are expected."""
    return os.path.exists(_CONTROL)


def found_no_gpu(pid: int) -> bool:
    """Whether a process has initialised CUDA, and CUDA has found no GPU for it (`CUDA_VISIBLE_DEVICES=""`, also of programs
    that only ask `torch.cuda.is_available()`). The driver says that such a process is running, and refuses to lock it
    (CUDA_ERROR_OPERATING_SYSTEM; driver 580). It holds nothing. Only for one that is not checkpointed: that has no GPU open
    either."""
    try:
        control = os.stat(_CONTROL)
        if not stat.S_ISCHR(control.st_mode) or os.major(control.st_rdev) != _MAJOR:
            return False  # a stand-in for the driver: its processes open no devices
        return not any(link.startswith("/dev/nvidia") for _, link, _ in read_links(pid))
    except OSError:
        return False


def holds_cuda(pid: int) -> bool:
    """Whether the process has threads of the driver. They stay during a checkpoint, and a program that only tried to
    initialise CUDA has none."""
    try:
        return any(_DRIVER_THREAD.fullmatch(name) for name in thread_names(pid).values())
    except OSError:
        return False
