"""The GPUs of this node as protobuf messages, from the helper's NVML inventory.

A caller gets a result within seconds, even if it says that NVML does not answer. One query runs at a time, however many
callers there are, and continues after they have stopped waiting: on a node whose driver does not stay loaded the first
query takes long, and if it were given up each time it would never finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda import library
from snapshotd.cuda.helper_pool import HelperPool
from snapshotd.cuda.helper_process import Lost
from snapshotd.cuda.seen import SeenGpus

WAIT_S = 5.0  # limit for a caller
QUERY_S = 30.0  # until a query is given up and the helper is killed
KEPT_S = 1.0  # `migrator nodes` asks often
FAILURE_KEPT_S = 30.0  # a lost GPU makes every query hang: a helper killed each minute is enough
_TRIES = 3


@dataclass(frozen=True)
class Inventory:
    """The node's GPUs. Reservations are not in it: `reserved_for` is empty."""

    driver_version: str = ""
    gpus: list[pb.Gpu] = field(default_factory=list)
    problem: str = ""  # why GPUs are missing here; empty if none are
    lost: list[pb.Gpu] = field(default_factory=list)  # that were here since the node booted

    def copy(self) -> Inventory:
        """A copy whose messages the caller may change."""
        gpus, lost = [_copied(gpu) for gpu in self.gpus], [_copied(gpu) for gpu in self.lost]
        return Inventory(self.driver_version, gpus, self.problem, lost)


def from_answer(answer: Mapping[str, Any]) -> Inventory:
    """From the result of nvml.inventory()."""
    gpus = [
        pb.Gpu(**{**gpu, "processes": [pb.GpuProcess(**each) for each in gpu["processes"]]}) for gpu in answer["gpus"]
    ]
    return Inventory(answer["driver_version"], gpus, answer["problem"])


def _copied(gpu: pb.Gpu) -> pb.Gpu:
    other = pb.Gpu()
    other.CopyFrom(gpu)
    return other


class InventoryCache:
    """The node's inventory, kept for a moment."""

    def __init__(self, helpers: HelperPool, library_dir: str, memory: Path | None = None) -> None:
        self._helpers = helpers
        self._ever = SeenGpus(memory)
        self._library_dir = library_dir
        self._query: asyncio.Task[None] | None = None
        self._query_began = 0.0
        self._seen = Inventory()
        self._seen_until = 0.0

    async def now(self, *, fresh: bool = False, at_most_s: float | None = None) -> Inventory:
        """Never raises: failures are in its `problem`. `fresh`: the result of a query that begins now. `at_most_s`: how long
        the caller waits at most."""
        if not library.found(library.NVML, self._library_dir):
            missing = f"{library.NVML} is not in the loader's search path; `gpu_library_dir` can name its folder"
            return Inventory(problem=missing if library.driver_loaded() else "")
        if fresh and self._query is not None:
            await asyncio.wait({self._query}, timeout=WAIT_S)
        if fresh or time.monotonic() >= self._seen_until:
            if self._query is None or self._query.done():
                self._query, self._query_began = asyncio.create_task(self._see()), time.monotonic()
            limit_s = WAIT_S if at_most_s is None else min(at_most_s, WAIT_S)
            await asyncio.wait({self._query}, timeout=self._query_began + limit_s - time.monotonic())
            if not self._query.done():
                silent = f"NVML did not answer within {limit_s:g} s; the kernel's log (Xid) may name a lost GPU"
                return Inventory(self._seen.driver_version, problem=silent)
        return self._seen.copy()

    async def close(self) -> None:
        """After the helpers are closed: a running query has lost its helper by then."""
        if self._query is not None:
            await asyncio.wait({self._query})

    async def _see(self) -> None:
        found = await self._ask()
        self._ever.note(found.gpus)
        self._seen = replace(found, lost=self._ever.lost(found.gpus)) if found.gpus else found
        self._seen_until = time.monotonic() + (KEPT_S if self._seen.gpus else FAILURE_KEPT_S)

    async def _ask(self) -> Inventory:
        problem = ""
        for _ in range(_TRIES):
            try:
                helper = await self._helpers.current()
                answer = await helper.ask("inventory", QUERY_S)
            except TimeoutError:
                problem = f"NVML did not answer within {QUERY_S:g} s; the kernel's log (Xid) may name a lost GPU"
                break
            except Lost as lost:
                problem = str(lost)
                continue
            if "unusable" in answer or not (answer["error"] or answer["gpus"] or answer["problem"]):
                helper.retire()  # it is not needed any more
            if "unusable" in answer:
                return Inventory(problem="" if answer["no_gpu"] else answer["unusable"])
            return Inventory(problem=answer["error"]) if answer["error"] else from_answer(answer)
        return Inventory(self._seen.driver_version, problem=problem)
