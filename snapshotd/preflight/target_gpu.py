"""Whether this node has suitable GPUs. The checks use the same choice that Prepare will make (snapshotd/cuda/pairing.py).

The choice applies its conditions in order and stops at the first that no GPU of this node meets. Each check is one of
these conditions. The checks after the failed one report that they were not reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.cuda.pairing import Unfit, choose
from snapshotd.preflight.verdict import passed, refused, warned

#: The conditions in order, each with the text to show if it is met.
CONDITIONS = {
    "gpu-present": "enough GPUs",
    "gpu-driver": "",
    "gpu-mig": "whole GPUs",
    "gpu-chip": "the same chip",
    "gpu-free": "not in use",
    "gpu-memory": "enough free memory",
}


@dataclass(frozen=True)
class GpuOffer:
    """The GPUs that a rank needs, compared with those of this node."""

    facts: pb.RankFacts
    node: pb.NodeInfo
    wish: str
    resumes: bool = False

    @cached_property
    def choice(self) -> tuple[Sequence[pb.GpuPair], str] | Unfit:
        try:
            return choose(self.facts.gpu, self.node.gpus, self.wish, resumes=self.resumes)
        except Unfit as unfit:
            return unfit

    def check(self, name: str) -> Check:
        if not self.facts.HasField("gpu"):
            return self._without()
        choice = self.choice
        if name == "gpu-present" and self.node.gpu_problem and not self.node.gpus:
            return refused(
                name,
                f"the GPUs of {self.node.name} cannot be listed: {self.node.gpu_problem}",
                f"make sure that `nvidia-smi` works for root on {self.node.name}",
            )
        if isinstance(choice, Unfit):
            if choice.check == name:
                return refused(name, choice.reason, choice.advice)
            if list(CONDITIONS).index(choice.check) < list(CONDITIONS).index(name) and name != "gpu-driver":
                return passed(name, f"not checked, because {choice.check} failed")
        if name == "gpu-driver":
            return self._driver()
        if name == "gpu-present" and not isinstance(choice, Unfit):
            return passed(name, choice[1])
        return passed(name, CONDITIONS[name])

    def _without(self) -> Check:
        if self.wish:
            return warned("gpu-present", f"--gpu {self.wish} has no effect: the rank uses no GPU", "omit --gpu")
        return passed("gpu-present", "no GPU in use")

    def _driver(self) -> Check:
        """The process's memory contains state of the driver library, which must find the same driver version again."""
        there, here = self.facts.gpu.driver_version, self.node.driver_version
        if there != here:
            return refused(
                "gpu-driver",
                f"the NVIDIA driver is {there or 'unknown'} on the source and {here or 'missing'} on {self.node.name}",
                "install the same NVIDIA driver on both nodes, or choose another node",
            )
        return passed("gpu-driver", f"driver {here}")
