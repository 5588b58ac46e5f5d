"""Whether the GPUs and the memory of this node are ready for moves, from its description."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.selfcheck.finding import Finding, failed, ok, warning


def gpus(info: pb.NodeInfo) -> list[Finding]:
    if info.gpu_problem:
        return [failed("gpu", info.gpu_problem, "see `nvidia-smi` and `dmesg` on this node")]
    if not info.gpus:
        return [ok("gpu", "no GPU")]
    found = [ok("gpu", f"{len(info.gpus)} GPUs, driver {info.driver_version}")]
    if unloaded := [str(gpu.index) for gpu in info.gpus if gpu.HasField("persistence") and not gpu.persistence]:
        text = f"persistence mode is off (GPU {', '.join(unloaded)}): the first use of a GPU takes seconds, in the pause too"
        found.append(warning("persistence", text, "run `nvidia-smi -pm 1`, or enable nvidia-persistenced"))
    if parted := [str(gpu.index) for gpu in info.gpus if gpu.mig]:
        text = f"partitioned with MIG (GPU {', '.join(parted)}): their ranks cannot be moved"
        found.append(warning("mig", text, "run `nvidia-smi -mig 0` if ranks on these GPUs are to be moved"))
    return found


def memory(info: pb.NodeInfo) -> list[Finding]:
    """Device memory travels through host memory on both nodes: all of it at once, or through rings."""
    room = min(info.memory_available_bytes, info.image_capacity_bytes - info.image_held_bytes)
    largest = max((gpu.memory_bytes for gpu in info.gpus), default=0)
    if room < min(largest, info.device_window_bytes or largest):
        text = f"{room / 1e9:.1f} GB of host memory for images, and a GPU with {largest / 1e9:.1f} GB"
        remedy = "free host memory or enlarge image_dir before moving a rank that fills a GPU"
        hint = "" if info.device_window_bytes else "; with hold_device_memory = true much less is needed"
        return [warning("memory", text, remedy + hint)]
    return [ok("memory", f"{room / 1e9:.1f} GB of host memory for images")]
