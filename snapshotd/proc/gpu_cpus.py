"""The CPUs near a GPU: those of the socket, or of the part of it, that the GPU is connected to."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")  # one directory for each GPU, named after its PCI address
PCI = Path("/sys/bus/pci/devices")
_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MAX_CPUS = 1 << 16


def near(uuids: Collection[str], gpus: Path = GPUS, pci: Path = PCI) -> set[int]:
    """The CPUs near these GPUs together; empty if those of one are not known. Only files of the kernel are read, because the
    driver may take seconds to answer."""
    found: dict[str, set[int]] = {}
    try:
        for gpu in gpus.iterdir() if uuids else ():
            match = _UUID.search((gpu / "information").read_text())
            if match is not None and match[1] in uuids:
                found[match[1]] = parse((pci / gpu.name.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    if any(not found.get(uuid) for uuid in uuids):
        return set()
    return set().union(*found.values())


def parse(text: str) -> set[int]:
    """A list as the kernel writes it: 0-3,8. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) >= _MAX_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cpus
