"""The GPUs of this node as the wire knows them, from what the helper learned of NVML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb


@dataclass(frozen=True)
class Inventory:
    """What is known of the node's GPUs. Nobody's reservations are in it: `reserved_for` is empty."""

    driver_version: str = ""
    gpus: list[pb.Gpu] = field(default_factory=list)
    problem: str = ""  # why some or all of the GPUs are missing here, in words; empty: none are

    def copy(self) -> Inventory:
        """One whose messages the caller may change."""
        return Inventory(self.driver_version, [_copied(gpu) for gpu in self.gpus], self.problem)


def from_answer(answer: Mapping[str, Any]) -> Inventory:
    """From nvml.look()'s values."""
    gpus = [
        pb.Gpu(**{**gpu, "processes": [pb.GpuProcess(**each) for each in gpu["processes"]]}) for gpu in answer["gpus"]
    ]
    return Inventory(answer["driver_version"], gpus, answer["problem"])


def _copied(gpu: pb.Gpu) -> pb.Gpu:
    other = pb.Gpu()
    other.CopyFrom(gpu)
    return other
