"""Lab nodes with GPUs that are not there: each node's daemon gets the stand-ins of libcuda and NVML, with GPUs of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.harness import WORKLOADS, Cluster, Job, until
from tests.fakes.cuda_fake import FakeGpu, GpuNode, gpus

#: A small one, which hashes all it has on the device in every step; a later --mib counts.
STEPS = (sys.executable, str(WORKLOADS / "device_steps.py"), "--mib", "4")


class GpuCluster:
    """A cluster whose nodes have stand-in GPUs."""

    def __init__(self, cluster: Cluster, folder: Path, options: Sequence[str] = ()) -> None:
        """`options`: of `migrator run`, for its jobs."""
        self.cluster, self.lab, self.options = cluster, cluster.lab, options
        shutil.rmtree(folder, ignore_errors=True)
        # The ledger's entries are locked while a process lives, and only locks on files of the node itself can travel.
        more: dict[str, object] = {"ledger_dir": "/dev/shm"}
        self.nodes = {node: GpuNode(folder / node, gpus(node), more=more) for node in self.lab.nodes}
        for node, made in self.nodes.items():
            self.configure(node, {"gpu_library_dir": made.library_dir})

    def configure(self, node: str, keys: Mapping[str, Any]) -> None:
        """The node's daemon, started again with these keys in its configuration."""
        path = self.lab.layout.node(node) / "snapshotd.toml"
        lines = [line for line in path.read_text().splitlines() if line.partition(" ")[0] not in keys]
        added = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        path.write_text("\n".join([*added, *lines]) + "\n")
        self.restart(node)

    def restart(self, node: str) -> None:
        self.lab.kill_daemon(node)
        self.lab.start_daemon(node)

    def reset(self) -> None:
        """As at the start, for the next test."""
        for node, made in self.nodes.items():
            made.clear_faults()
            made.gpus, made.driver_version = gpus(node), "580.159.04"
            made.write()
        self.cluster.tidy()
        until("nobody is on a GPU any more", lambda: not any(self._on_gpus()))

    def _on_gpus(self) -> list[int]:
        nodes = json.loads(self.cluster.migrator("nodes", "--json").stdout)["nodes"]
        return [process["pid"] for node in nodes for gpu in node.get("gpus", ()) for process in gpu["processes"]]

    def give(self, node: str, *cards: FakeGpu) -> None:
        """Other GPUs for a node; processes that run keep the ones they saw."""
        self.nodes[node].gpus = list(cards)
        self.nodes[node].write()

    def shown(self, node: str) -> dict[str, Any]:
        """The node as `migrator nodes` shows it."""
        answer = json.loads(self.cluster.migrator("nodes", "--json").stdout)
        return next(found for found in answer["nodes"] if found["name"] == node)

    def job(self, node: str, *arguments: str, steps: int = 120, pace_s: float = 0.03, **more: Any) -> Job:
        """`device_steps.py` on a node's GPU."""
        argv = [*STEPS, "--steps", str(steps), "--pace-s", str(pace_s), *arguments]
        return self.cluster.start(node, ["env", *self._environment(node), *argv], **{"options": self.options, **more})

    def _environment(self, node: str) -> list[str]:
        return [f"{key}={value}" for key, value in self.nodes[node].environment.items()]
