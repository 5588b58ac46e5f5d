"""`migrator nodes`: lists the nodes and their state."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any

from migrator import formatting
from migrator.cli import arguments, output
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError

HEADS: tuple[str, ...] = (
    "NAME",
    "ENDPOINT",
    "STATE",
    "VERSION",
    "KERNEL",
    "CRIU",
    "MEMORY FREE",
    "IMAGES",
    "RANKS",
    "MOVES",
)
GPU_HEAD = "GPUS"


def add(verbs: arguments.Verbs) -> None:
    verbs.add(
        "nodes",
        act,
        "list the nodes and their state",
        more="IMAGES is the memory that images of current moves use, and the size of the image store. GPUS are the models and"
        " their free memory; a reserved GPU waits for a rank that is being moved to it.",
        examples="  migrator nodes\n  migrator nodes --json",
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)

    async def ask(client: DaemonClient) -> pb.NodeInfo:
        return await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)

    answers, silent = asyncio.run(ask_all(cluster, ask))
    if as_json:
        objects = [to_json(node, cluster, answers.get(node), silent.get(node)) for node in cluster.nodes]
        output.warn_silent(silent, len(cluster.nodes), as_json=True)
        output.json_object({"cluster": cluster.origin, "nodes": objects})
    else:
        rows = [_row(node, cluster, answers.get(node), silent.get(node)) for node in cluster.nodes]
        heads = (*HEADS, GPU_HEAD)
        if not any(info.gpus or info.gpu_problem for info in answers.values()):
            heads, rows = HEADS, [row[:-1] for row in rows]
        output.table(heads, rows, right=("MEMORY FREE", "RANKS", "MOVES"))
        output.warn_silent(silent, len(cluster.nodes), as_json=False)
    return 0


def state(error: SnapshotError | None) -> str:
    return "up" if error is None else error.code


def to_json(node: str, cluster: Cluster, info: pb.NodeInfo | None, error: SnapshotError | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": node, "endpoint": cluster.nodes[node], "state": state(error)}
    if error is not None:
        return found | {"reason": error.message, "remedy": error.advice}
    info = info or pb.NodeInfo()
    return found | {
        "version": info.version,
        "kernel": info.kernel,
        "architecture": info.architecture,
        "criu_version": info.criu_version,
        "boot_id": info.boot_id,
        "memory_available_bytes": info.memory_available_bytes,
        "image_capacity_bytes": info.image_capacity_bytes,
        "image_held_bytes": info.image_held_bytes,
        "ranks": info.ranks,
        "moves_running": info.moves_running,
        "driver_version": info.driver_version,
        "gpu_problem": info.gpu_problem,
        "gpus": [_gpu_json(gpu) for gpu in info.gpus],
    }


def _gpu_json(gpu: pb.Gpu) -> dict[str, Any]:
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name,
        "compute_capability": gpu.compute_capability,
        "memory_bytes": gpu.memory_bytes,
        "memory_free_bytes": gpu.memory_free_bytes,
        "mig": gpu.mig,
        "reserved_for": gpu.reserved_for,
        "processes": [
            {"pid": process.pid, "memory_bytes": process.memory_bytes, "mps": process.mps} for process in gpu.processes
        ],
    }


def _row(node: str, cluster: Cluster, info: pb.NodeInfo | None, error: SnapshotError | None) -> tuple[str, ...]:
    if info is None:
        return (node, cluster.nodes[node], state(error), *("-" for _ in HEADS[3:]), "-")
    return (
        node,
        cluster.nodes[node],
        state(error),
        info.version,
        info.kernel,
        info.criu_version,
        formatting.size(info.memory_available_bytes),
        f"{formatting.size(info.image_held_bytes)} of {formatting.size(info.image_capacity_bytes)}",
        str(info.ranks),
        str(info.moves_running),
        gpu_text(info),
    )


def gpu_text(info: pb.NodeInfo) -> str:
    """ "2 × NVIDIA H200, 281.9 GB free, 1 reserved", or why the GPUs cannot be listed."""
    if not info.gpus:
        return f"unknown: {info.gpu_problem}" if info.gpu_problem else "-"
    chips = Counter(gpu.name + (" (MIG)" if gpu.mig else "") for gpu in info.gpus)
    parts = [f"{count} × {chip}" for chip, count in chips.items()]
    parts.append(f"{formatting.size(sum(gpu.memory_free_bytes for gpu in info.gpus))} free")
    if reserved := sum(bool(gpu.reserved_for) for gpu in info.gpus):
        parts.append(f"{reserved} reserved")
    if info.gpu_problem:
        parts.append(f"others unknown: {info.gpu_problem}")
    return ", ".join(parts)
