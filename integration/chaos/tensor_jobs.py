"""A tensor and data parallel job on the fake NCCL that is snapshotted and rolled back while it runs.

Four ranks in a square, or eight with two pipeline stages; with device memory they are on fake GPUs.
"""

from __future__ import annotations

import shutil

from integration.chaos.jobs import Gpus
from integration.chaos.protected_jobs import ProtectedJob
from integration.harness import Cluster, Job
from integration.nccl_nodes import NcclJob, undisturbed

PACE_S = 0.15
DEVICE_MIB = 4
_SHAPES = {4: "square", 8: "grid"}
#: One undisturbed run serves several jobs.
_ROUNDED = 512


class TensorParallel(ProtectedJob):
    kind = "nccl"
    held_copy_runs = True

    def __init__(self, nodes: Cluster, homes: list[str], gpus: Gpus | None = None) -> None:
        self.shape, self.device_mib = _SHAPES[len(homes)], DEVICE_MIB if gpus else 0
        if gpus:
            self.kind = "nccl-gpu"
        super().__init__(nodes, homes, gpus)

    def start(self) -> list[Job]:
        self.job = NcclJob(
            self.nodes,
            self.homes,
            shape=self.shape,
            pace_s=PACE_S,
            gpus=self.gpus,
            device_mib=self.device_mib,
            witnesses=[ledger.path for ledger in self.ledgers],
            errors=[self.errors(rank) for rank in range(len(self.homes))],
            name=self.name,
        )
        return self.job.ranks

    def ask_to_end(self) -> None:
        (self.job.meeting / "end").touch()

    def expected(self, steps: int) -> list[list[str]]:
        count = -(-steps // _ROUNDED) * _ROUNDED
        return list(undisturbed(self.shape, len(self.homes), count, self.device_mib))

    def result(self, line: str) -> str:
        return line.split()[1]

    def is_right(self, line: str, undisturbed: str) -> bool:
        return line == undisturbed

    def remove(self) -> None:
        super().remove()
        shutil.rmtree(self.job.meeting, ignore_errors=True)
