"""Checks of GPU ranks that need a witness inside the process: the shim, which can park its threads and has counted calls.

Most counters only grow: they tell that something was made, not that it is still there (what is opened, and exported memory
that the shim backs, is counted down again). Where /proc can tell that, it has the last word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from snapshotd.api.errors import SnapshotError
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import devmem
from snapshotd.preflight.gpu import RESERVE_BYTES, GpuLook, cuda_processes
from snapshotd.preflight.look import Look
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import tree
from snapshotd.proc.processes import Process, read_text

#: The driver keeps one small mapping of its own below; managed memory has the address the kernel gave it, far above.
_MANAGED_ABOVE = 1 << 40
_MANAGED_DEVICE = "/dev/nvidia-uvm"
#: What `migrator run` sets for the shim.
_DEVICE_MEMORY, _OFFLOAD = "SNAPSHIM_DEVICE_MEMORY", "offload"


class Counters(Protocol):
    @property
    def managed(self) -> int: ...
    @property
    def exports(self) -> int: ...
    @property
    def imports(self) -> int: ...


class Backed(Protocol):
    @property
    def bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...


class Mailbox(Protocol):
    def state(self) -> Counters: ...
    def device_memory(self) -> Backed: ...


class Shim(Protocol):
    """What is asked of snapshotd/inprocess/shimctl.py."""

    def problems(self, pid: int) -> list[str]: ...
    def find(self, process: tree.Process) -> Mailbox | None: ...


def parking(look: Look, gpu: GpuLook, shim: Shim) -> Check:
    """While the driver works inside the process nothing of the job may run: each of its threads waits in the shim."""
    found = [problem for process in cuda_processes(look, gpu) for problem in shim.problems(process.pid)]
    if found:
        return refused(
            "gpu-parking",
            f"threads that cannot be held while the GPU is checkpointed: {listed(found)}",
            "start the job with `migrator run`, which preloads the shim, and leave the signal SIGRTMAX-3 alone",
        )
    return passed("gpu-parking", "the shim can hold every thread")


def managed_memory(look: Look, gpu: GpuLook, shim: Shim) -> Check:
    holders = cuda_processes(look, gpu)
    found = [f"{process}: {size >> 20} MiB" for process in holders if (size := _managed_bytes(process))]
    if found:
        return refused(
            "gpu-managed-memory",
            f"managed memory, which the driver cannot checkpoint: {listed(found)}",
            "use plain device memory (cudaMalloc) instead of cudaMallocManaged; turn managed pools off (RMM, cuDF, CuPy)",
        )
    counted = [f"{process}: {told.managed}" for process, told in _counters(holders, shim) if told.managed]
    if counted:
        return warned(
            "gpu-managed-memory",
            f"managed memory was allocated, none is mapped now: {listed(counted)} times",
            "none to worry about if it was freed; otherwise the driver refuses the checkpoint and the job goes on",
        )
    return passed("gpu-managed-memory", "none")


def _managed_bytes(process: Process) -> int:
    return sum(
        mapping.size_bytes
        for mapping in process.mappings
        if mapping.path == _MANAGED_DEVICE and mapping.start >= _MANAGED_ABOVE
    )


def ipc(look: Look, gpu: GpuLook, shim: Shim) -> Check:
    """Device memory that two processes share would be two memories afterwards, and the driver does not carry it."""
    found = [
        f"{process}: {told.exports} handles given out, {told.imports} opened"
        for process, told in _counters(cuda_processes(look, gpu), shim)
        if told.exports or told.imports
    ]
    if found:
        return refused(
            "gpu-ipc",
            f"device memory was shared between processes (CUDA IPC): {listed(found)}",
            "pass tensors between processes in host memory (`tensor.cpu()` before a multiprocessing queue) and start again; "
            "a program that shares no events can free and close what it shared instead",
        )
    return passed("gpu-ipc", "no handles given out or opened")


def parked_bytes(look: Look, gpu: GpuLook, shim: Shim) -> int:
    """Device memory that leaves in stripes, not by the driver's checkpoint."""
    return sum(size for size, _ in _parked(cuda_processes(look, gpu), shim))


def device_memory(look: Look, gpu: GpuLook, shim: Shim) -> Check:
    """Who moves it: what `migrator run` presets, and what came of it."""
    holders = cuda_processes(look, gpu)
    settings = {_variable(process) for process in holders}
    shown = f"{_DEVICE_MEMORY}={'|'.join(sorted(settings))}"
    found = _parked(holders, shim)
    if not found:
        if _OFFLOAD in settings:
            return warned(
                "gpu-device-memory",
                f"{shown}, and no process has {devmem.LEAST_BYTES >> 20} MiB that the shim backs: the driver's checkpoint"
                " carries all",
                "none if it allocates later; memory of pools (cudaMallocAsync), and a process's from its second GPU on, the"
                " driver always carries",
            )
        return passed("gpu-device-memory", f"{shown}: the driver's checkpoint carries it")
    size, blocks = sum(size for size, _ in found), sum(blocks for _, blocks in found)
    return passed(
        "gpu-device-memory", f"{shown}: {size >> 20} MiB in {blocks} blocks are parked, the driver has the rest"
    )


def parked_room(wanted_bytes: int, room_bytes: int) -> Check:
    """On the source: the stripes are in memory until the move has ended."""
    needed = wanted_bytes + RESERVE_BYTES
    if room_bytes < needed:
        return warned(
            "gpu-parked-room",
            f"{needed >> 20} MiB are needed to park device memory, {room_bytes >> 20} MiB are free here: the driver's"
            " checkpoint carries it",
            "free memory here, or enlarge the tmpfs that holds image_dir, for a shorter pause",
        )
    return passed("gpu-parked-room", f"{room_bytes >> 20} MiB free, {needed >> 20} MiB needed")


def _parked(processes: Sequence[Process], shim: Shim) -> list[tuple[int, int]]:
    """Bytes and blocks of each process that has enough of them."""
    found = []
    for process in processes:
        with contextlib.suppress(SnapshotError):
            if mailbox := shim.find(tree.Process(process.pid, process.start_ticks)):
                backed = mailbox.device_memory()
                if backed.bytes >= devmem.LEAST_BYTES:
                    found.append((backed.bytes, backed.blocks))
    return found


def _variable(process: Process) -> str:
    for entry in read_text(f"/proc/{process.pid}/environ").split("\0"):
        name, _, value = entry.partition("=")
        if name == _DEVICE_MEMORY:
            return value
    return "-"


def _counters(processes: Sequence[Process], shim: Shim) -> list[tuple[Process, Counters]]:
    """Of the processes whose shim can be asked; the others are gpu-parking's to refuse."""
    found = []
    for process in processes:
        with contextlib.suppress(SnapshotError):
            if mailbox := shim.find(tree.Process(process.pid, process.start_ticks)):
                found.append((process, mailbox.state()))
    return found
