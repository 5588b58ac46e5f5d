"""Checks of a rank that uses GPUs, and what its target has to know of them.

What needs the driver (which GPUs there are, which processes hold CUDA) was asked before and is handed in as a GpuLook:
nothing here waits for a GPU. Invariant: what the driver's checkpoint cannot carry is refused here, while the job still
runs; whatever belongs to a process that it does carry is gone before CRIU looks, and passes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.cuda.pairing import describe, driver_major
from snapshotd.preflight.look import Look
from snapshotd.preflight.objects import Kind
from snapshotd.preflight.resources import NETWORK_DEVICE
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.memory import THIS_NODE, memory_room
from snapshotd.proc.processes import Process, read_identity, read_text

#: The first driver with a checkpoint of processes.
OLDEST_DRIVER = 570

#: What a process that holds CUDA has open and the checkpoint closes. Not the tools' and the display's devices.
_CUDA_DEVICE = re.compile(r"/dev/(nvidia\d+|nvidiactl|nvidia-uvm|nvidia-caps(-imex-channels)?/.+)")
_NVIDIA = "/dev/nvidia"
_CARD = re.compile(r"/dev/nvidia(\d+)")

#: Variables that make the driver load a tool into the process. Many jobs set others (NSYS_NVTX_…) and run without one.
_TOOL_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
#: nsys, ncu, nvprof, compute-sanitizer, cuda-gdb. libcupti is not among them: torch itself links it.
_TOOL_LIBRARY = re.compile(r"lib(ToolsInjection|cuda-injection|Interceptor|cuinj|sanitizer-|cudadebugger)")

#: Left free beside the device memory that the checkpoint puts into the process.
RESERVE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class GpuLook:
    """What the driver said of this node and of the tree's processes, just before the look at /proc."""

    driver_version: str
    gpus: tuple[pb.Gpu, ...]  # of the node, in the driver's order
    cuda_pids: tuple[int, ...]  # processes of the tree that hold CUDA, as the daemon numbers them
    problem: str = ""  # why the node's GPUs could not be told


def uses_cuda(pids: Iterable[int]) -> list[int]:
    """The processes that have libcuda loaded: those the driver has to be asked about. Blocking, about a millisecond each."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                if b"/libcuda.so" in file.read():
                    found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def facts_of(look: Look, gpu: GpuLook, parked_bytes: int = 0) -> pb.GpuFacts:
    facts = pb.GpuFacts(driver_version=gpu.driver_version, processes=len(gpu.cuda_pids), uses=uses(look, gpu))
    facts.device_bytes = sum(use.memory_bytes for use in facts.uses)
    facts.offloaded_bytes = min(parked_bytes, facts.device_bytes)
    for card in gpu.gpus:
        facts.node_gpus.add().CopyFrom(card)
        facts.node_gpus[-1].ClearField("processes")  # of this node's others: nobody's business elsewhere
    return facts


def uses(look: Look, gpu: GpuLook) -> list[pb.GpuUse]:
    """On which GPUs the tree is, and with how much memory: as the driver tells, else as much as it can be."""
    cards = _open_cards(look, gpu)
    told = _tells_processes(gpu)
    found = []
    for card in gpu.gpus:
        mine = [process for process in card.processes if process.pid in gpu.cuda_pids]
        if not mine and (told or card.index not in cards):
            continue
        size = sum(process.memory_bytes for process in mine)
        if not all(process.memory_bytes for process in mine) or not mine:
            size = max(0, card.memory_bytes - card.memory_free_bytes)
        found.append(pb.GpuUse(uuid=card.uuid, memory_bytes=size))
    return found


def _tells_processes(gpu: GpuLook) -> bool:
    """Inside a container the driver tells no processes, or tells them by numbers of the host's."""
    pids = {process.pid for card in gpu.gpus for process in card.processes}
    return bool(pids & set(gpu.cuda_pids)) or (bool(pids) and all(os.path.exists(f"/proc/{pid}") for pid in pids))


def _open_cards(look: Look, gpu: GpuLook) -> set[int]:
    """The GPUs whose device a process that holds CUDA has open; the devices are numbered as the GPUs are."""
    found = set()
    for thing in look.of_kind(Kind.GPU):
        if (card := _CARD.fullmatch(thing.path)) and any(process.pid in gpu.cuda_pids for process in thing.holders):
            found.add(int(card[1]))
    return found


def cuda_processes(look: Look, gpu: GpuLook) -> list[Process]:
    return [process for process in look.tree.alive if process.pid in gpu.cuda_pids]


def descriptors(look: Look) -> Check:
    """For every rank, also after the freeze, when nothing may be left: CRIU cannot dump a GPU's descriptors and mappings."""
    covered = look.gpu.cuda_pids if look.gpu else ()
    found = [
        (thing.path, f"{process} {'maps' if number < 0 else f'fd {number}:'} {thing.link}")
        for thing in look.of_kind(Kind.GPU)
        for process, number in thing.holders.items()
        if process.pid not in covered or not _CUDA_DEVICE.fullmatch(thing.path)
    ]
    if found:
        nvidia = all(path.startswith(_NVIDIA) for path, _ in found)
        return refused(
            "gpu-descriptors",
            f"GPU devices that the CUDA checkpoint does not close: {listed([words for _, words in found])}",
            "start the job with `migrator run`, whose shim closes what forked children inherit; let processes that only"
            " watch or render (NVML, EGL, Vulkan) close the GPU, or run outside the job"
            if nvidia
            else "only NVIDIA GPUs move, and only what uses them by CUDA: close the device before the move",
        )
    if look.gpu is None:
        return passed("gpu-descriptors", "no GPU in use")
    return passed(
        "gpu-descriptors", f"only of processes that use CUDA: {listed(_names(cuda_processes(look, look.gpu)))}"
    )


def driver(look: Look, gpu: GpuLook) -> Check:
    remedy = f"install an NVIDIA driver of version {OLDEST_DRIVER} or newer (580 to change the GPU)"
    major = driver_major(gpu.driver_version)
    if not major or not gpu.gpus:
        return refused(
            "gpu-driver",
            f"this node's GPUs cannot be told: {gpu.problem or 'the driver names none'}",
            "see that `nvidia-smi` works for root on this node",
        )
    if major < OLDEST_DRIVER:
        return refused("gpu-driver", f"driver {gpu.driver_version} cannot checkpoint processes", remedy)
    if gpu.problem:
        return warned(
            "gpu-driver",
            f"driver {gpu.driver_version}, which cannot tell of all GPUs here: {gpu.problem}",
            "the restore wants every GPU that the rank could see: if it fails, the job goes on here; see `nvidia-smi`",
        )
    return passed("gpu-driver", f"driver {gpu.driver_version}")


def mps(look: Look, gpu: GpuLook) -> Check:
    mine = {use.uuid for use in uses(look, gpu)}
    found = [
        f"{describe(card)}, pid {process.pid}"
        for card in gpu.gpus
        for process in card.processes
        if (process.mps and process.pid in gpu.cuda_pids) or (card.uuid in mine and _is_mps_server(process.pid))
    ]
    if found:
        return refused(
            "gpu-mps",
            f"the GPU is shared by the multi-process service: {listed(found)}",
            "run the job without MPS: end the control daemon (`echo quit | nvidia-cuda-mps-control`) and start again",
        )
    return passed("gpu-mps", "not in use")


def _is_mps_server(pid: int) -> bool:
    try:
        return read_identity(pid).name.startswith("nvidia-cuda-mps")
    except (FileNotFoundError, ProcessLookupError):
        return False


def mig(look: Look, gpu: GpuLook) -> Check:
    mine = {use.uuid for use in uses(look, gpu)}
    found = [describe(card) for card in gpu.gpus if card.mig and card.uuid in mine]
    found += [str(process) for process in cuda_processes(look, gpu) if "MIG-" in _variables(process).get(_VISIBLE, "")]
    if found:
        return refused(
            "gpu-mig",
            f"on a part of a GPU (MIG), which the driver cannot checkpoint: {listed(found)}",
            "run the job on a whole GPU (`nvidia-smi -mig 0`)",
        )
    return passed("gpu-mig", "whole GPUs")


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _variables(process: Process) -> dict[str, str]:
    """The environment it was started with."""
    pairs = (entry.partition("=") for entry in read_text(f"/proc/{process.pid}/environ").split("\0"))
    return {name: value for name, _, value in pairs}


def rdma(look: Look, gpu: GpuLook) -> Check:
    found = [str(thing) for thing in look.of_kind(Kind.DEVICE) if NETWORK_DEVICE.match(thing.path)]
    if found:
        return refused(
            "gpu-rdma",
            f"device memory may be registered with a network card: {listed(found)}",
            "turn RDMA off for the job (NCCL_IB_DISABLE=1 NCCL_NET=Socket, and UCX_TLS without rc and gdr_copy)",
        )
    return passed("gpu-rdma", "no RDMA device open")


def profiler(look: Look, gpu: GpuLook) -> Check:
    found = []
    for process in cuda_processes(look, gpu):
        names = [name for name in _TOOL_VARIABLES if _variables(process).get(name)]
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
            f"a profiler or debugger is in the process, whose state the driver cannot checkpoint: {listed(found)}",
            "start the job without it (nsys, ncu, compute-sanitizer, cuda-gdb)",
        )
    return passed("gpu-profiler", "none in the process")


def host_memory(look: Look, gpu: GpuLook, parked_bytes: int = 0) -> Check:
    """The checkpoint puts device memory into the process's own: an out-of-memory kill would end the job. What is parked is
    in this node's memory as well, but not in the job's."""
    wanted = sum(use.memory_bytes for use in uses(look, gpu)) + RESERVE_BYTES
    rooms = [(whose, room + (0 if whose == THIS_NODE else parked_bytes)) for whose, room in memory_room(look.root_pid)]
    whose, room = min(rooms, key=lambda one: one[1])
    if room < wanted:
        return refused(
            "gpu-host-memory",
            f"the checkpoint puts what is on the GPU into host memory and needs {wanted >> 20} MiB there, {whose} leaves"
            f" {room >> 20} MiB",
            "free memory, raise the job's memory limit, or let the job keep less on the GPU",
        )
    return passed("gpu-host-memory", f"{wanted >> 20} MiB needed, {room >> 20} MiB free ({whose})")


def _names(processes: Iterable[Process]) -> list[str]:
    return [str(process) for process in processes]
