"""Checks of GPU ranks that need information from inside the process: the shim parks its threads and counts its calls.

Most counters only grow. They show that something was created, not that it still exists; only opened handles, and exported
memory that the shim backs, are counted down again. Where /proc shows the present state, /proc decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from snapshotd.api.errors import SnapshotError
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import devmem
from snapshotd.preflight.gpu_checks import VISIBLE, cuda_processes, uses
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.process_info import ProcessInfo
from snapshotd.preflight.reports import DriverReport
from snapshotd.preflight.shared_memory import Sharing, lasting
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import environ
from snapshotd.proc.room import RESERVE_BYTES
from snapshotd.proc.tree import Process

#: The driver has one small mapping of its own below; managed memory is at the address the kernel chose, far above.
_MANAGED_ABOVE = 1 << 40
_MANAGED_DEVICE = "/dev/nvidia-uvm"
#: What `migrator run` sets for the shim.
_DEVICE_MEMORY, _OFFLOADS = "SNAPSHIM_DEVICE_MEMORY", {"offload", "shared"}


class Counters(Sharing, Protocol):
    @property
    def managed(self) -> int: ...
    @property
    def visible(self) -> str | None: ...


class Backed(Protocol):
    @property
    def bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...


class Mailbox(Protocol):
    def state(self) -> Counters: ...
    def device_memory(self) -> Backed: ...


class Shim(Protocol):
    """The part of snapshotd/inprocess/shimctl.py that is used here."""

    def problems(self, pid: int) -> list[str]: ...
    def find(self, process: Process) -> Mailbox | None: ...


def parking(rank: Inspection, gpu: DriverReport, shim: Shim) -> Check:
    """While the driver works inside the process no code of the job may run: each of its threads waits in the shim."""
    found = [problem for process in cuda_processes(rank, gpu) for problem in shim.problems(process.pid)]
    if found:
        return refused(
            "gpu-parking",
            f"some threads cannot be parked while the GPU is checkpointed: {listed(found)}",
            "start the job with `migrator run`, which preloads the shim, and do not use the signal SIGRTMAX-3",
        )
    return passed("gpu-parking", "the shim can park every thread")


def managed_memory(rank: Inspection, gpu: DriverReport, shim: Shim) -> Check:
    holders = cuda_processes(rank, gpu)
    found = [f"{process}: {size >> 20} MiB" for process in holders if (size := _managed_bytes(process))]
    if found:
        return refused(
            "gpu-managed-memory",
            f"the rank uses managed memory, which the driver cannot checkpoint: {listed(found)}",
            "use device memory (cudaMalloc) instead of cudaMallocManaged; turn managed pools off (RMM, cuDF, CuPy)",
        )
    counted = [f"{process}: {counters.managed}" for process, counters in _counters(holders, shim) if counters.managed]
    if counted:
        return warned(
            "gpu-managed-memory",
            f"the rank has allocated managed memory before, and none is mapped now: {listed(counted)} times",
            "nothing to do if it was freed; otherwise the driver refuses the checkpoint and the move is undone",
        )
    return passed("gpu-managed-memory", "none")


def _managed_bytes(process: ProcessInfo) -> int:
    return sum(
        mapping.size_bytes
        for mapping in process.mappings
        if mapping.path == _MANAGED_DEVICE and mapping.start >= _MANAGED_ABOVE
    )


def ipc(rank: Inspection, gpu: DriverReport, shim: Shim) -> Check:
    """Device memory that two processes share would become two memories, unless the shim closes it and opens it again."""
    processes = cuda_processes(rank, gpu)
    stuck, found = lasting(lambda: [(str(process), counters) for process, counters in _counters(processes, shim)])
    if stuck is not None:
        return refused("gpu-ipc", stuck.reason, stuck.remedy)
    exports, imports = (sum(getattr(one, name) for _, one in found) for name in ("exports", "imports"))
    if exports or imports:
        return passed("gpu-ipc", f"{exports} handles exported, {imports} opened, all between processes of the rank")
    return passed("gpu-ipc", "no handles exported or opened")


def shares(rank: Inspection, gpu: DriverReport, shim: Shim) -> bool:
    """Whether its processes share device memory that moves with it."""
    found = _counters(cuda_processes(rank, gpu), shim)
    return any(counters.exports or counters.imports for _, counters in found)


def visible_devices(rank: Inspection, gpu: DriverReport, shim: Shim) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES of each process that uses CUDA, as it was when CUDA started: a program may set it itself. Of one
    whose shim does not say, as it was when the process started."""
    holders = cuda_processes(rank, gpu)
    told = {process.pid: counters.visible for process, counters in _counters(holders, shim)}
    return {
        process.pid: environ.read(process.pid).get(VISIBLE, "") if (value := told.get(process.pid)) is None else value
        for process in holders
    }


def offloaded_bytes(rank: Inspection, gpu: DriverReport, shim: Shim) -> int:
    """Device memory that the shim moves in stripes, not the driver's checkpoint."""
    return sum(size for size, _ in _offloaded(cuda_processes(rank, gpu), shim))


def held_stripes(rank: Inspection, gpu: DriverReport, shim: Shim) -> int:
    """The stripes in which this memory leaves if it stays on its GPU until it is sent; 0: it goes through files."""
    if not rank.holds or len(uses(rank, gpu)) != 1:
        return 0
    return devmem.STRIPES * len(_offloaded(cuda_processes(rank, gpu), shim))


def device_memory(rank: Inspection, gpu: DriverReport, shim: Shim) -> Check:
    """Whether the driver's checkpoint or the shim moves it: what `migrator run` set, and the effect."""
    holders = cuda_processes(rank, gpu)
    values = {environ.read(process.pid).get(_DEVICE_MEMORY, "-") for process in holders}
    shown = f"{_DEVICE_MEMORY}={'|'.join(sorted(values))}"
    found = _offloaded(holders, shim)
    if not found:
        if _OFFLOADS & values:
            return warned(
                "gpu-device-memory",
                f"{shown}, but no process has {devmem.LEAST_BYTES >> 20} MiB of memory that the shim backs: the driver's"
                " checkpoint moves all of it, which takes longer",
                "nothing to do if the job allocates later; the driver always moves memory of pools (cudaMallocAsync), and"
                " what a process has on its second and further GPUs",
            )
        return passed("gpu-device-memory", f"{shown}: the driver's checkpoint moves it")
    size, blocks = sum(size for size, _ in found), sum(blocks for _, blocks in found)
    return passed(
        "gpu-device-memory", f"{shown}: {size >> 20} MiB in {blocks} blocks are offloaded, the driver moves the rest"
    )


def offload_room(files_bytes: int, room_bytes: int) -> Check:
    """On the source: the stripes' files stay in memory until the move has ended, or are rings of so many bytes."""
    needed = files_bytes + RESERVE_BYTES
    if room_bytes < needed:
        return warned(
            "gpu-offload-room",
            f"{needed >> 20} MiB of memory are needed to offload device memory, {room_bytes >> 20} MiB are free on this node:"
            " the driver's checkpoint moves it instead, which takes longer",
            "free memory on this node, or enlarge the tmpfs that holds image_dir",
        )
    return passed("gpu-offload-room", f"{room_bytes >> 20} MiB free, {needed >> 20} MiB needed")


def _offloaded(processes: Sequence[ProcessInfo], shim: Shim) -> list[tuple[int, int]]:
    """Bytes and blocks of each process that has enough of them."""
    found = []
    for process in processes:
        with contextlib.suppress(SnapshotError):
            if mailbox := shim.find(Process(process.pid, process.start_ticks)):
                backed = mailbox.device_memory()
                if backed.bytes >= devmem.LEAST_BYTES or mailbox.state().moving_exports:
                    found.append((backed.bytes, backed.blocks))
    return found


def _counters(processes: Sequence[ProcessInfo], shim: Shim) -> list[tuple[ProcessInfo, Counters]]:
    """Of the processes whose shim can be read; gpu-parking refuses the others."""
    found = []
    for process in processes:
        with contextlib.suppress(SnapshotError):
            if mailbox := shim.find(Process(process.pid, process.start_ticks)):
                found.append((process, mailbox.state()))
    return found
