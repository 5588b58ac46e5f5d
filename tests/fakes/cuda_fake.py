"""Creates nodes with fake GPUs: builds the fakes of libcuda, NVML and the runtime once, and makes a folder per node.

A node's folder has the libraries (as links, so that a process restored on another node maps the same file), gpus.json,
the ledger of device memory, and the faults. Nothing outside it is touched. A process in another mount namespace must
see the folder at the same path.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent / "cuda"
BUILT = SOURCES / "build"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13")


@functools.cache
def build() -> Path:
    """Builds the fakes unless they are up to date, and returns their folder."""
    with (SOURCES / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-s", "-j2", "-C", SOURCES], capture_output=True, text=True, timeout=110, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the stand-ins of the CUDA libraries cannot be built:\n{done.stdout}{done.stderr}")
    return BUILT


@dataclass(frozen=True)
class FakeGpu:
    """A GPU as gpus.json describes it. `mig` is None if the chip has no MIG; `virtual_memory`: its memory can be mapped.
    From `lost` on, what NVML says about its health."""

    uuid: str
    name: str = "NVIDIA H200"
    memory_mib: int = 4096
    compute_capability: str = "9.0"
    minor: int = 0
    mig: bool | None = False
    mps: bool = False
    virtual_memory: bool = True
    lost: bool = False
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    remapped_corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    temperature_c: int = 40
    slow_reasons: int = 0  # NVML's bits
    pcie_replays: int = 0
    pcie_width: int = 16
    nvlinks: int = 0
    nvlinks_down: int = 0  # a bit for each link
    nvlink_errors: int = 0


def gpus(node: str, count: int = 1, memory_mib: int = 4096, name: str = "NVIDIA H200") -> list[FakeGpu]:
    """So many equal GPUs, with UUIDs derived from the node's name."""
    return [
        FakeGpu(f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node}')}", name, memory_mib, minor=index)
        for index in range(count)
    ]


@dataclass
class GpuNode:
    """A node's folder. `checkpoints`: False for a driver so old that it has no checkpoint calls."""

    folder: Path
    gpus: list[FakeGpu]
    driver_version: str = "580.159.04"
    context_mib: int = 64
    checkpoints: bool = True
    more: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        built = build()
        use = self.folder / "use"
        use.mkdir(parents=True, exist_ok=True)
        use.chmod(0o1777)  # ranks of every user write their entry there
        (use / "lock").touch()
        (use / "lock").chmod(0o666)
        for name in LIBRARIES:
            link = self.folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(built / name if self.checkpoints or name != LIBRARIES[0] else built / "r550" / name)
        self.write()

    @property
    def library_dir(self) -> str:
        """For the daemon's `gpu_library_dir`, and for `Gpus`."""
        return str(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which the loader of a program or of a daemon's helper finds this node's libraries."""
        rest = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{self.folder}:{rest}" if rest else str(self.folder)}

    def write(self) -> None:
        """Writes this object to gpus.json. A process that has initialised CUDA keeps the GPUs that it saw."""
        content = {
            "driver_version": self.driver_version,
            "context_mib": self.context_mib,
            **self.more,
            "gpus": [asdict(gpu) for gpu in self.gpus],
        }
        fresh = self.folder / "gpus.json.new"
        fresh.write_text(json.dumps(content, indent=1))
        fresh.rename(self.folder / "gpus.json")

    def change(self, index: int = 0, **values: Any) -> None:
        """Changes one GPU, such as its health: `change(ecc_uncorrected=3)`. The next query of NVML sees it."""
        self.gpus[index] = replace(self.gpus[index], **values)
        self.write()

    def fault(self, operation: str, action: str, *, once: bool = True, pid: int | None = None) -> None:
        """Adds a fault (see cuda/faults.h): `fault("restore", "fail:CUDA_ERROR_OUT_OF_MEMORY")`.

        A program's own calls read the file of the node where the program was started, also after it was moved."""
        line = " ".join([f"{operation}: {action}", *(["once"] if once else []), *([f"pid={pid}"] if pid else [])])
        self._rewrite([*self.faults(), line])

    def clear_faults(self) -> None:
        self._rewrite([])

    def faults(self) -> list[str]:
        """The faults that are still armed."""
        try:
            return (self.folder / "faults").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _rewrite(self, lines: Iterable[str]) -> None:
        with (self.folder / "faults").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write("".join(f"{line}\n" for line in lines))
