"""Can the rank's GPUs be found here? The checks use the same choice that Prepare will make (snapshotd/cuda/pairing.py).

The choice goes through its conditions in order and stops at the first that nothing here meets; the checks are these
conditions by name. Those behind it were not reached, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.cuda.pairing import Unfit, choose
from snapshotd.preflight.verdict import passed, refused, warned

#: The conditions of the choice, in its order, each with what it means to have met it.
CONDITIONS = {
    "gpu-present": "enough GPUs here",
    "gpu-driver": "",
    "gpu-mig": "whole GPUs",
    "gpu-chip": "the same chip",
    "gpu-free": "not taken by others",
    "gpu-memory": "enough free memory",
}


@dataclass(frozen=True)
class GpuOffer:
    """The GPUs of a rank held against those of this node."""

    facts: pb.RankFacts
    node: pb.NodeInfo
    wish: str

    @cached_property
    def choice(self) -> tuple[Sequence[pb.GpuPair], str] | Unfit:
        try:
            return choose(self.facts.gpu, self.node.gpus, self.wish)
        except Unfit as unfit:
            return unfit

    def check(self, name: str) -> Check:
        if not self.facts.HasField("gpu"):
            return self._without()
        choice = self.choice
        if name == "gpu-present" and self.node.gpu_problem and not self.node.gpus:
            return refused(
                name,
                f"this node's GPUs cannot be told: {self.node.gpu_problem}",
                "see that `nvidia-smi` works for root on this node",
            )
        if isinstance(choice, Unfit):
            if choice.check == name:
                return refused(name, choice.reason, choice.advice)
            if list(CONDITIONS).index(choice.check) < list(CONDITIONS).index(name) and name != "gpu-driver":
                return passed(name, f"not looked at: see {choice.check}")
        if name == "gpu-driver":
            return self._driver()
        if name == "gpu-present" and not isinstance(choice, Unfit):
            return passed(name, choice[1])
        return passed(name, CONDITIONS[name])

    def _without(self) -> Check:
        if self.wish:
            return warned("gpu-present", f"the rank uses no GPU, asked for {self.wish}", "leave --gpu out")
        return passed("gpu-present", "no GPU in use")

    def _driver(self) -> Check:
        """The driver's own part of a process's memory goes with it: it must find the same driver again."""
        there, here = self.facts.gpu.driver_version, self.node.driver_version
        if there != here:
            return refused(
                "gpu-driver",
                f"driver {there or 'unknown'} on the source, {here or 'none'} here",
                "install the same NVIDIA driver on both nodes, or choose another node",
            )
        return passed("gpu-driver", f"driver {here}")
