"""Checks of a rank that uses GPUs, and the facts about its GPUs that the target needs.

What needs the driver (the node's GPUs, the processes that hold CUDA) was collected before and is passed in as a
DriverReport: nothing here waits for a GPU. Invariant: what the driver's checkpoint cannot handle is refused here, while
the job still runs. What belongs to a process that it can handle is gone before CRIU looks, and passes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.cuda.pairing import describe, driver_major
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind
from snapshotd.preflight.process_info import ProcessInfo
from snapshotd.preflight.reports import DriverReport
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import comm, environ
from snapshotd.proc.memory import THIS_NODE, memory_room
from snapshotd.proc.room import RESERVE_BYTES

#: The first driver that can checkpoint processes.
OLDEST_DRIVER = 570

#: What a process that holds CUDA has open and the checkpoint closes. Devices of tools and displays are not among them.
_CUDA_DEVICE = re.compile(r"/dev/(nvidia\d+|nvidiactl|nvidia-uvm|nvidia-caps(-imex-channels)?/.+)")
_NVIDIA = "/dev/nvidia"
_CARD = re.compile(r"/dev/nvidia(\d+)")

#: Variables that make the driver load a tool into the process. Many jobs set others (NSYS_NVTX_…) and run without one.
_TOOL_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
#: nsys, ncu, nvprof, compute-sanitizer, cuda-gdb. libcupti is not among them, since torch itself links it.
_TOOL_LIBRARY = re.compile(r"lib(ToolsInjection|cuda-injection|Interceptor|cuinj|sanitizer-|cudadebugger)")
VISIBLE = "CUDA_VISIBLE_DEVICES"


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_SEE_NVIDIA_SMI = "make sure that `nvidia-smi` works for root on this node"


def facts_of(rank: Inspection, gpu: DriverReport, visible: Mapping[int, str], offloaded_bytes: int = 0) -> pb.GpuFacts:
    """`visible`: CUDA_VISIBLE_DEVICES of each process that holds CUDA."""
    facts = pb.GpuFacts(driver_version=gpu.driver_version, processes=len(gpu.cuda_pids), uses=uses(rank, gpu))
    facts.device_bytes = sum(use.memory_bytes for use in facts.uses)
    facts.offloaded_bytes = min(offloaded_bytes, facts.device_bytes)
    for card in (*gpu.gpus, *seen_and_lost(rank, gpu)):
        facts.node_gpus.add().CopyFrom(card)
        facts.node_gpus[-1].ClearField("processes")  # other jobs' processes do not concern the target
    seen = [_visible(visible[one.pid]) for one in cuda_processes(rank, gpu)]
    facts.visible = min((count for count in seen if count), default=0)
    return facts


def seen_and_lost(rank: Inspection, gpu: DriverReport) -> list[pb.Gpu]:
    """The lost GPUs that a process which holds CUDA may have seen: it was started before they were first missed."""
    started_s = min((one.start_ticks / _TICKS_PER_S for one in cuda_processes(rank, gpu)), default=0.0)
    return [card for card in gpu.lost if not card.missed_since_s or started_s <= card.missed_since_s]


def _visible(value: str) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES lets a process see; 0: it is not set. The numbers in it mean nothing here, because a
    scheduler that hides devices numbers the rest anew. CUDA ignores everything from the first invalid name on."""
    names = [name.strip() for name in value.split(",")]
    return next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))


def uses(rank: Inspection, gpu: DriverReport) -> list[pb.GpuUse]:
    """The GPUs that the tree uses, and how much memory on each: as the driver reports, else the most it can be."""
    cards = _open_cards(rank, gpu)
    reported = _reports_processes(gpu)
    found = []
    for card in gpu.gpus:
        mine = [process for process in card.processes if process.pid in gpu.cuda_pids]
        if not mine and (reported or card.index not in cards):
            continue
        size = sum(process.memory_bytes for process in mine)
        if not all(process.memory_bytes for process in mine) or not mine:
            size = max(0, card.memory_bytes - card.memory_free_bytes)
        found.append(pb.GpuUse(uuid=card.uuid, memory_bytes=size))
    return found


def _reports_processes(gpu: DriverReport) -> bool:
    """Inside a container the driver reports no processes, or reports them by the host's pids."""
    pids = {process.pid for card in gpu.gpus for process in card.processes}
    return bool(pids & set(gpu.cuda_pids)) or (bool(pids) and all(os.path.exists(f"/proc/{pid}") for pid in pids))


def _open_cards(rank: Inspection, gpu: DriverReport) -> set[int]:
    """The GPUs whose device a process that holds CUDA has open. Devices are numbered as the GPUs are."""
    found = set()
    for thing in rank.of_kind(Kind.GPU):
        if (card := _CARD.fullmatch(thing.path)) and any(process.pid in gpu.cuda_pids for process in thing.holders):
            found.add(int(card[1]))
    return found


def cuda_processes(rank: Inspection, gpu: DriverReport) -> list[ProcessInfo]:
    return [process for process in rank.tree.alive if process.pid in gpu.cuda_pids]


def descriptors(rank: Inspection) -> Check:
    """For every rank. Also after the freeze, when none may be left: CRIU cannot dump descriptors and mappings of a GPU."""
    covered = rank.gpu.cuda_pids if rank.gpu else ()
    found = [
        (thing.path, f"{process} {'maps' if number < 0 else f'fd {number}:'} {thing.link}")
        for thing in rank.of_kind(Kind.GPU)
        for process, number in thing.holders.items()
        if process.pid not in covered or not _CUDA_DEVICE.fullmatch(thing.path)
    ]
    if found:
        nvidia = all(path.startswith(_NVIDIA) for path, _ in found)
        return refused(
            "gpu-descriptors",
            f"the rank has GPU devices open that the CUDA checkpoint does not close: {listed([text for _, text in found])}",
            "start the job with `migrator run`, whose shim closes what forked children inherit; processes that only monitor"
            " or render (NVML, EGL, Vulkan) must close the GPU or run outside the job"
            if nvidia
            else "close the device before the move: only NVIDIA GPUs can be moved, and only if they are used through CUDA",
        )
    if rank.gpu is None:
        return passed("gpu-descriptors", "no GPU in use")
    return passed(
        "gpu-descriptors", f"only in processes that use CUDA: {listed(_names(cuda_processes(rank, rank.gpu)))}"
    )


def driver(rank: Inspection, gpu: DriverReport) -> Check:
    major = driver_major(gpu.driver_version)
    if not major or not gpu.gpus:
        return refused(
            "gpu-driver",
            f"this node's GPUs cannot be listed: {gpu.problem or 'the driver reports none'}",
            _SEE_NVIDIA_SMI,
        )
    if major < OLDEST_DRIVER:
        return refused(
            "gpu-driver",
            f"this node's NVIDIA driver {gpu.driver_version} cannot checkpoint processes",
            f"install NVIDIA driver {OLDEST_DRIVER} or newer (580 or newer to move between GPUs)",
        )
    lost = seen_and_lost(rank, gpu)
    if gpu.problem or lost:
        known = f"; known since the node booted: {listed([describe(card) for card in lost])}" if lost else ""
        return warned(
            "gpu-driver",
            f"driver {gpu.driver_version} cannot list all GPUs of this node: {gpu.problem or 'some are lost'}{known}",
            "the restore needs every GPU that the rank could see; if it fails, the move is undone. See `nvidia-smi`",
        )
    return passed("gpu-driver", f"driver {gpu.driver_version}")


def mps(rank: Inspection, gpu: DriverReport) -> Check:
    mine = {use.uuid for use in uses(rank, gpu)}
    found = [
        f"{describe(card)}, pid {process.pid}"
        for card in gpu.gpus
        for process in card.processes
        if (process.mps and process.pid in gpu.cuda_pids) or (card.uuid in mine and _is_mps_server(process.pid))
    ]
    if found:
        return refused(
            "gpu-mps",
            f"the rank's GPU is shared through the multi-process service (MPS): {listed(found)}",
            "stop MPS (`echo quit | nvidia-cuda-mps-control`) and start the job again without it",
        )
    return passed("gpu-mps", "not in use")


def _is_mps_server(pid: int) -> bool:
    return comm.name_or(pid, "").startswith("nvidia-cuda-mps")


def mig(rank: Inspection, gpu: DriverReport, visible: Mapping[int, str]) -> Check:
    mine = {use.uuid for use in uses(rank, gpu)}
    found = [describe(card) for card in gpu.gpus if card.mig and card.uuid in mine]
    found += [str(one) for one in cuda_processes(rank, gpu) if "MIG-" in visible[one.pid]]
    if found:
        return refused(
            "gpu-mig",
            f"the rank uses a partition of a GPU (MIG), which the driver cannot checkpoint: {listed(found)}",
            "run the job on a whole GPU (`nvidia-smi -mig 0`)",
        )
    return passed("gpu-mig", "whole GPUs")


def profiler(rank: Inspection, gpu: DriverReport) -> Check:
    found = []
    for process in cuda_processes(rank, gpu):
        variables = environ.read(process.pid)
        names = [name for name in _TOOL_VARIABLES if variables.get(name)]
        names += {
            os.path.basename(mapping.path)
            for mapping in process.mappings
            if _TOOL_LIBRARY.match(os.path.basename(mapping.path))
        }
        if names:
            found.append(f"{process}: {', '.join(names)}")
    if found:
        return refused(
            "gpu-profiler",
            f"a profiler or debugger is loaded into the process, and the driver cannot checkpoint its state: {listed(found)}",
            "start the job without it (nsys, ncu, compute-sanitizer, cuda-gdb)",
        )
    return passed("gpu-profiler", "none in the process")


def host_memory(rank: Inspection, gpu: DriverReport, offloaded_bytes: int = 0, rings_bytes: int = 0) -> Check:
    """The checkpoint copies device memory into the process's own memory, where an out-of-memory kill would end the job.

    What the shim offloads also goes into this node's memory, but does not count towards the job's limits. With
    `rings_bytes` it stays on its GPU until it is sent, and this node needs only so much for it.
    """
    all_bytes = sum(use.memory_bytes for use in uses(rank, gpu))
    rest_bytes = max(0, all_bytes - offloaded_bytes) + RESERVE_BYTES
    here_bytes = rest_bytes + (rings_bytes or min(all_bytes, offloaded_bytes))
    rooms = [(what, room, here_bytes if what == THIS_NODE else rest_bytes) for what, room in memory_room(rank.root_pid)]
    what, room, needed = min(rooms, key=lambda one: one[1] - one[2])
    if room < needed:
        return refused(
            "gpu-host-memory",
            f"the checkpoint copies device memory to host memory and needs {needed >> 20} MiB there; {what} leaves"
            f" {room >> 20} MiB",
            "free memory on this node, raise the job's memory limit, or reduce what the job keeps on the GPU",
        )
    return passed("gpu-host-memory", f"{needed >> 20} MiB needed, {room >> 20} MiB free ({what})")


def _names(processes: Iterable[ProcessInfo]) -> list[str]:
    return [str(process) for process in processes]
