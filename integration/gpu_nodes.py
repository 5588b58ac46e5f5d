"""Lab nodes with fake GPUs: each daemon and each job gets the fake libcuda and NVML, with GPUs of its node."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.harness import WORKLOADS, Cluster, Job, until
from tests.fakes.cuda_fake import FakeGpu, GpuNode, gpus

#: Has 4 MiB on the device and hashes all of it in each step. A later --mib overrides this one.
PROGRAM = (sys.executable, str(WORKLOADS / "device_steps.py"), "--mib", "4")
_numbers = itertools.count(1)


class GpuCluster:
    """A cluster whose nodes have fake GPUs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.lab = cluster, cluster.lab
        #: Options of `migrator run` for the jobs of one test.
        self.options: Sequence[str] = ()
        self._arguments: dict[str, tuple[str, ...]] = {}
        shutil.rmtree(folder, ignore_errors=True)
        # A live process holds a lock on its entry in the ledger. CRIU can move only locks on files of the node itself.
        more: dict[str, object] = {"ledger_dir": "/dev/shm"}
        self.nodes = {node: GpuNode(folder / node, gpus(node), more=more) for node in self.lab.nodes}
        self._alone = GpuNode(folder / "alone", gpus("alone", count=2))
        for node, made in self.nodes.items():
            self.configure(node, {"gpu_library_dir": made.library_dir})

    def configure(self, node: str, keys: Mapping[str, Any]) -> None:
        """Adds keys to the configuration of a node's daemon and restarts it."""
        self.cluster.configure(node, keys)

    def restart(self, node: str) -> None:
        self.lab.kill_daemon(node)
        self.lab.start_daemon(node)

    def reset(self) -> None:
        """Restores the initial state for the next test."""
        for node, made in self.nodes.items():
            made.clear_faults()
            made.gpus, made.driver_version = gpus(node), "580.159.04"
            made.write()
        self.options = ()
        self._arguments.clear()
        self.cluster.tidy()
        until("all GPUs to be idle", lambda: not any(self._on_gpus()))

    def _on_gpus(self) -> list[int]:
        nodes = json.loads(self.cluster.migrator("nodes", "--json").stdout)["nodes"]
        return [process["pid"] for node in nodes for gpu in node.get("gpus", ()) for process in gpu["processes"]]

    def give(self, node: str, *cards: FakeGpu) -> None:
        """Replaces the GPUs of a node. Running processes keep the ones they saw."""
        self.nodes[node].gpus = list(cards)
        self.nodes[node].write()

    def shown(self, node: str) -> dict[str, Any]:
        """The node as `migrator nodes` shows it, which may be a second old."""
        answer = json.loads(self.cluster.migrator("nodes", "--json").stdout)
        return next(found for found in answer["nodes"] if found["name"] == node)

    def used_bytes(self, node: str) -> int:
        """The device memory in use on a node's only GPU, as `shown`."""
        (gpu,) = self.shown(node)["gpus"]
        return int(gpu["memory_bytes"] - gpu["memory_free_bytes"])

    # ------------------------------------------------------------------ jobs

    def job(self, node: str, *arguments: str, pace_s: float = 0.03, **more: Any) -> Job:
        """Starts `device_steps.py` on a node's GPU. It runs until `ends_well` ends it."""
        name = f"device{next(_numbers)}"
        self._end(name).unlink(missing_ok=True)
        self._arguments[name] = arguments
        argv = [*PROGRAM, "--steps", "1000000", "--pace-s", str(pace_s), "--until", str(self._end(name)), *arguments]
        environment = [f"{key}={value}" for key, value in self.nodes[node].environment.items()]
        return self.cluster.start(node, ["env", *environment, *argv], job=name, **{"options": self.options, **more})

    def _end(self, name: str) -> Path:
        return self.cluster.folder / f"{name}.end"

    def ends_well(self, *jobs: Job) -> None:
        """Ends jobs. The output of each is that of a run on another GPU, without moves and without the shim; lines that a job
        has printed again after a rollback count once."""
        for job in jobs:
            self._ends_well(job)
        self.nothing_left()

    def _ends_well(self, job: Job) -> None:
        job.await_progress(2)
        self._end(job.name).touch()
        assert job.finish() == 0, f"{job.text()[-500:]}\n{self.cluster.logs()}"
        said = list(dict.fromkeys(job.lines()))  # after a rollback steps are made again, with the same results
        steps = sum(line.startswith("step ") for line in said)
        command = [*PROGRAM, "--steps", str(steps), "--pace-s", "0", *self._arguments[job.name]]
        alone = subprocess.run(
            command, env={**os.environ, **self._alone.environment}, capture_output=True, text=True, check=True
        )
        assert said == alone.stdout.splitlines()

    def nothing_left(self) -> None:
        try:
            until("leftovers to be removed", lambda: not self.cluster.leftovers())
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.cluster.leftovers()}\n{self.cluster.logs()}") from None
