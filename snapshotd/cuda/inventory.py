"""The GPUs of this node as the wire knows them, from what the helper learns of NVML.

Whoever asks gets an answer within seconds, be it that NVML does not answer. One look is under way at a time, however
many ask, and goes on when they stop waiting: on a node whose driver does not stay loaded the first look takes long, and
one that were given up each time would never come to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda import library
from snapshotd.cuda.link import Lost
from snapshotd.cuda.links import Links

WAIT_S = 5.0  # of whoever asks
LOOK_S = 30.0  # until a look is given up and the helper killed
KEPT_S = 1.0  # `migrator nodes` asks often
TROUBLE_KEPT_S = 30.0  # a GPU off the bus hangs every look: a helper killed each minute is enough
_TRIES = 3


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


class Lookout:
    """The node's inventory, kept for a moment."""

    def __init__(self, links: Links, library_dir: str) -> None:
        self._links = links
        self._library_dir = library_dir
        self._look: asyncio.Task[None] | None = None
        self._look_began = 0.0
        self._seen = Inventory()
        self._seen_until = 0.0

    async def now(self, *, fresh: bool = False) -> Inventory:
        """Never raises: what cannot be told is its `problem`."""
        if not library.found(library.NVML, self._library_dir):
            missing = f"{library.NVML} is not where the loader looks; `gpu_library_dir` can name its folder"
            return Inventory(problem=missing if library.driver_loaded() else "")
        if fresh or time.monotonic() >= self._seen_until:
            if self._look is None or self._look.done():
                self._look, self._look_began = asyncio.create_task(self._see()), time.monotonic()
            await asyncio.wait({self._look}, timeout=self._look_began + WAIT_S - time.monotonic())
            if not self._look.done():
                silent = f"NVML did not answer within {WAIT_S:g} s; the kernel's log (Xid) may name a lost GPU"
                return Inventory(self._seen.driver_version, problem=silent)
        return self._seen.copy()

    async def close(self) -> None:
        """After the links are closed: a look under way has lost its helper then."""
        if self._look is not None:
            await asyncio.wait({self._look})

    async def _see(self) -> None:
        self._seen = await self._ask()
        self._seen_until = time.monotonic() + (KEPT_S if self._seen.gpus else TROUBLE_KEPT_S)

    async def _ask(self) -> Inventory:
        problem = ""
        for _ in range(_TRIES):
            try:
                link = await self._links.current()
                answer = await link.ask("inventory", LOOK_S)
            except TimeoutError:
                problem = f"NVML did not answer within {LOOK_S:g} s; the kernel's log (Xid) may name a lost GPU"
                break
            except Lost as lost:
                problem = str(lost)
                continue
            if "unusable" in answer or not (answer["error"] or answer["gpus"] or answer["problem"]):
                link.retire()  # nothing to ask it again for: it need not stay
            if "unusable" in answer:
                return Inventory(problem="" if answer["no_gpu"] else answer["unusable"])
            return Inventory(problem=answer["error"]) if answer["error"] else from_answer(answer)
        return Inventory(self._seen.driver_version, problem=problem)
