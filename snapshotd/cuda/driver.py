"""The CUDA driver's checkpoint verbs for processes of this node, each bounded in time, and the node's GPUs.

Every verb is idempotent: it returns when its state holds, whoever brought that about. A call that hangs costs the
helper process and nothing else: it is killed, the other calls in flight look at their process's state and are asked
again. The driver finishes a checkpoint or restore it has begun even if nobody waits for it, and a lock that was given
up may land later; so an error here never means "it did not happen": what holds is what `state` says.

The daemon itself loads neither libcuda nor NVML.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout
from snapshotd.cuda import library, refusals
from snapshotd.cuda.inventory import Inventory, from_answer
from snapshotd.cuda.link import Link, Lost
from snapshotd.cuda.refusals import called
from snapshotd.cuda.verbs import CHECKPOINT, LOCK, RESTORE, UNLOCK, Pair, State, Verb
from snapshotd.tree import Process

__all__ = ["Gpus", "Pair", "State"]

log = logging.getLogger(__name__)

STATE_S = 5.0  # a running process answers in milliseconds
INVENTORY_S = 5.0
INVENTORY_KEPT_S = 1.0  # `migrator nodes` asks often
TROUBLE_KEPT_S = 30.0  # a GPU off the bus hangs every look: one helper killed in half a minute is enough
_GRACE_S = 2.0  # how much longer than the driver we wait for a lock
_LOOK_S = 2.0  # for the state that an error tells
_LOSSES = 3  # a helper that dies this often in one call dies of it
_LEAST_S = 0.25  # with less time left nothing is asked again: a fresh helper would be killed before it is up


class Gpus:
    """The node's GPUs. One per daemon; starts its helper when it is first needed, and none where there is no driver."""

    def __init__(self, library_dir: str = "") -> None:
        self._library_dir = library_dir
        self._links: list[Link] = []  # the last one is in use
        self._starting = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._seen = Inventory()
        self._seen_until = 0.0
        self._no_gpu_until = 0.0
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether processes of this node can use CUDA, as far as that can be told without asking the driver."""
        return time.monotonic() >= self._no_gpu_until and library.found(library.CUDA, self._library_dir)

    async def close(self) -> None:
        """Ends the helper for good: whoever still waits for an answer, or asks, gets GpuFailed."""
        self._closed = True
        links, self._links = self._links, []
        for link in links:
            await link.close()

    async def state(self, process: Process, timeout_s: float = STATE_S) -> State | None:
        """The state the driver has for the process; None when it does not use CUDA, or is gone.

        Raises Timeout when it does not answer (a stopped process never does; one in the middle of a checkpoint answers
        when that is done), GpuFailed when the driver cannot be asked.
        """
        deadline = time.monotonic() + timeout_s
        losses = 0
        while self.available:
            try:
                return self._state_in(await self._ask("state", deadline, process), process)
            except TimeoutError as error:
                raise refusals.hung("the CUDA state", process, timeout_s, "") from error
            except Lost as lost:
                losses += not lost.by_us
                if losses >= _LOSSES or deadline - time.monotonic() < _LEAST_S:
                    raise refusals.helper_died("the CUDA state", process, str(lost)) from lost
        return None

    async def lock(self, process: Process, timeout_s: float) -> None:
        """Waits until the process's work on its GPUs is done and lets it start no more; Timeout when it is not."""
        await self._reach(LOCK, process, timeout_s)

    async def checkpoint(self, process: Process, timeout_s: float) -> None:
        """The device memory of a locked process goes into its host memory; no GPU is held any more."""
        await self._reach(CHECKPOINT, process, timeout_s)

    async def restore(self, process: Process, pairs: Sequence[Pair], timeout_s: float) -> None:
        """Back onto the GPUs that `pairs` names (every GPU of the node; none: where it was). It stays locked."""
        await self._reach(RESTORE, process, timeout_s, pairs)

    async def unlock(self, process: Process, timeout_s: float) -> None:
        """The process may use its GPUs again."""
        await self._reach(UNLOCK, process, timeout_s)

    async def inventory(self, *, fresh: bool = False) -> Inventory:
        """The node's GPUs, give or take a second unless `fresh`. Never raises: what cannot be told is its `problem`."""
        if not library.found(library.NVML, self._library_dir):
            missing = f"{library.NVML} is not where the loader looks; `gpu_library_dir` can name its folder"
            return Inventory(problem=missing if library.driver_loaded() else "")
        async with self._looking:
            if fresh or time.monotonic() >= self._seen_until:
                self._seen = await self._inventory()
                self._seen_until = time.monotonic() + (INVENTORY_KEPT_S if self._seen.gpus else TROUBLE_KEPT_S)
            return self._seen.copy()

    # ------------------------------------------------------------ how

    async def _reach(self, verb: Verb, process: Process, timeout_s: float, pairs: Sequence[Pair] = ()) -> None:
        deadline = time.monotonic() + timeout_s
        listed = [(pair.old_uuid, pair.new_uuid) for pair in pairs]
        losses = 0
        while True:
            try:
                if verb is LOCK:
                    timeout_ms = max(1, round((deadline - time.monotonic()) * 1000))
                    answer = await self._ask(verb.name, deadline + _GRACE_S, process, timeout_ms=timeout_ms)
                else:
                    answer = await self._ask(verb.name, deadline, process, pairs=listed)
            except TimeoutError as error:
                state = await self._look_apart(process)
                if state in verb.done:
                    return
                then = f"its CUDA state is {state.name.lower()}" if state else "its CUDA state cannot be learned either"
                raise refusals.hung(f"the {verb.name}", process, timeout_s, then) from error
            except Lost as lost:
                losses += not lost.by_us
                if losses >= _LOSSES or deadline - time.monotonic() < _LEAST_S:
                    raise refusals.helper_died(f"the {verb.name}", process, str(lost)) from lost
                log.warning("%s of %s is asked for again: %s", verb.name, called(process), lost)
                if await self.state(process, deadline - time.monotonic()) in verb.done:
                    return
                continue
            if answer.get("gone"):
                raise refusals.gone(process)
            if "unusable" in answer:
                raise refusals.unusable(answer["unusable"])
            if not answer["error"]:
                return
            state = await self._look(process)
            if state in verb.done:
                return
            if not process.alive():
                raise refusals.gone(process)
            if verb is RESTORE and answer["error"] == "CUDA_ERROR_OUT_OF_MEMORY":
                raise await self._out_of_memory(process, pairs)
            raise refusals.refused(verb, process, answer["error"], state, timeout_s)

    async def _helper(self) -> Link:
        async with self._starting:
            if self._closed:
                raise Lost("the daemon is ending", by_us=False)
            if not self._links or not self._links[-1].alive:
                self._links = [link for link in self._links if not link.ended]
                self._links.append(await Link.start(self._library_dir))
                log.info("started the GPU helper (pid %d)", self._links[-1].pid)
            return self._links[-1]

    async def _ask(self, call: str, deadline: float, process: Process, **arguments: Any) -> dict[str, Any]:
        link = await self._helper()
        answer = await link.ask(
            call, deadline - time.monotonic(), pid=process.pid, start_ticks=process.start_ticks, **arguments
        )
        if "unusable" in answer:
            link.retire()  # libcuda never tries again in the same process
        return answer

    def _state_in(self, answer: dict[str, Any], process: Process) -> State | None:
        if answer.get("gone"):
            return None
        if "unusable" in answer:
            if not answer["no_gpu"]:
                raise refusals.unusable(answer["unusable"])
            self._no_gpu_until = time.monotonic() + TROUBLE_KEPT_S
            return None
        if answer["error"]:
            if answer["error"] == "CUDA_ERROR_NOT_INITIALIZED" or not process.alive():
                return None
            raise refusals.state_unknown(process, answer["error"])
        return State(answer["state"])

    async def _look(self, process: Process) -> State | None:
        """The state for an error's sake; None as well when it cannot be learned."""
        try:
            return await self.state(process, _LOOK_S)
        except (GpuFailed, Timeout) as error:
            log.warning("%s", error.message)
            return None

    async def _look_apart(self, process: Process) -> State | None:
        """The same after a call hung, with a helper of its own: if this hangs too, no other call is disturbed."""
        with contextlib.suppress(TimeoutError, Lost, GpuFailed):
            link = await Link.start(self._library_dir)
            try:
                answer = await link.ask("state", _LOOK_S, pid=process.pid, start_ticks=process.start_ticks)
            finally:
                await link.close()
            return self._state_in(answer, process)
        return None

    async def _out_of_memory(self, process: Process, pairs: Sequence[Pair]) -> SnapshotError:
        wanted = {pair.new_uuid for pair in pairs}
        gpus = (await self.inventory()).gpus
        return refusals.out_of_memory(process, [gpu for gpu in gpus if not wanted or gpu.uuid in wanted])

    async def _inventory(self) -> Inventory:
        lost: Lost | None = None
        for _ in range(_LOSSES):
            try:
                link = await self._helper()
                answer = await link.ask("inventory", INVENTORY_S)
            except TimeoutError:
                problem = f"NVML did not answer within {INVENTORY_S:g} s; the kernel's log (Xid) may name a lost GPU"
                return Inventory(self._seen.driver_version, problem=problem)
            except Lost as error:
                lost = error
                continue
            if "unusable" in answer or not (answer["error"] or answer["gpus"] or answer["problem"]):
                link.retire()  # nothing to ask it again for: it need not stay
            if "unusable" in answer:
                return Inventory(problem="" if answer["no_gpu"] else answer["unusable"])
            return Inventory(problem=answer["error"]) if answer["error"] else from_answer(answer)
        return Inventory(self._seen.driver_version, problem=str(lost))
