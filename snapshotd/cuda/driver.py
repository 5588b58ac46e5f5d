"""The CUDA driver's checkpoint operations for processes of this node, each with a time limit, and the node's GPUs.

Every operation is idempotent: it returns when its state is reached, however that came about. A call that hangs costs only the
helper process: it is killed, and the other calls in flight check the state of their process and are repeated. The driver
finishes a checkpoint or restore that it has begun even if no one waits for it, and a lock that was given up may take effect
later. So an error here never means "it did not happen": `state` tells the truth.

The daemon itself loads neither libcuda nor NVML.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout
from snapshotd.cuda import library, refusals
from snapshotd.cuda.helper_pool import HelperPool
from snapshotd.cuda.helper_process import Lost
from snapshotd.cuda.inventory import Inventory, InventoryCache
from snapshotd.cuda.refusals import called
from snapshotd.cuda.states import CHECKPOINT, LOCK, RESTORE, UNLOCK, Pair, State, Verb
from snapshotd.proc.tree import Process

__all__ = ["Gpus", "Pair", "State"]

log = logging.getLogger(__name__)

STATE_S = 5.0  # a running process answers in milliseconds
NO_GPU_KEPT_S = 30.0  # how long "there is no GPU" is remembered
_GRACE_S = 2.0  # added to the driver's own limit for a lock
_CHECK_S = 2.0  # limit for reading the state that an error reports
_LOSSES = 3  # a helper that dies this often in one call dies because of it
_LEAST_S = 0.25  # with less time left a call is not repeated: it would only get the next helper killed


class _Limit:
    """The rest of a call's time limit. It is suspended while a helper is being started."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._ends += time.monotonic() - began


class Gpus:
    """The node's GPUs. One per daemon. Starts its helper when it is first needed, and none if there is no driver.
    `memory`: the file that remembers the GPUs since the node booted."""

    def __init__(self, library_dir: str = "", memory: Path | None = None) -> None:
        self._library_dir = library_dir
        self._helpers = HelperPool(library_dir)
        self._inventory = InventoryCache(self._helpers, library_dir, memory)
        self._no_gpu = ""  # the reason
        self._no_gpu_until = 0.0

    @property
    def available(self) -> bool:
        """Whether processes of this node can use CUDA, as far as can be told without the driver."""
        return time.monotonic() >= self._no_gpu_until and library.found(library.CUDA, self._library_dir)

    async def close(self) -> None:
        """Ends the helper for good: pending and later calls raise GpuFailed."""
        await self._helpers.close()
        await self._inventory.close()

    async def inventory(self, *, fresh: bool = False, at_most_s: float | None = None) -> Inventory:
        """The node's GPUs now, at most a second old unless `fresh`. Never raises: failures are in its `problem`.
        `at_most_s`: the caller waits no longer than this; NVML's silence is then such a failure."""
        return await self._inventory.now(fresh=fresh, at_most_s=at_most_s)

    async def state(self, process: Process, timeout_s: float = STATE_S) -> State | None:
        """The CUDA state of the process; None if it does not use CUDA, or is gone.

        Raises Timeout if the driver does not answer (a stopped process never does; one during a checkpoint answers when
        that is done), GpuFailed if the driver cannot be used.
        """
        limit = _Limit(timeout_s)
        losses = 0
        while self.available:
            try:
                return self._state_in(await self._ask("state", limit, process), process)
            except TimeoutError as error:
                raise refusals.hung("the CUDA state", process, timeout_s, "") from error
            except Lost as lost:
                losses += not lost.by_us
                if losses >= _LOSSES or limit.left_s < _LEAST_S:
                    raise refusals.helper_died("the CUDA state", process, str(lost)) from lost
        _refuse_if_it_uses_cuda(process, self._no_gpu or f"{library.CUDA} does not exist")
        return None

    async def lock(self, process: Process, timeout_s: float) -> None:
        """Waits until the process's GPU work is done and lets it start no more; Timeout if it does not finish."""
        await self._reach(LOCK, process, timeout_s)

    async def checkpoint(self, process: Process, timeout_s: float) -> None:
        """Copies the device memory of a locked process into its host memory and releases its GPUs."""
        await self._reach(CHECKPOINT, process, timeout_s)

    async def restore(self, process: Process, pairs: Sequence[Pair], timeout_s: float) -> None:
        """Restores it onto the GPUs that `pairs` names (all GPUs of the node; none: the same GPUs). It stays locked."""
        await self._reach(RESTORE, process, timeout_s, pairs)

    async def unlock(self, process: Process, timeout_s: float) -> None:
        """Lets the process use its GPUs again."""
        await self._reach(UNLOCK, process, timeout_s)

    # ------------------------------------------------------------ calls

    async def _reach(self, verb: Verb, process: Process, timeout_s: float, pairs: Sequence[Pair] = ()) -> None:
        limit = _Limit(timeout_s)
        listed = [(pair.old_uuid, pair.new_uuid) for pair in pairs]
        losses = 0
        while True:
            try:
                answer = await self._ask(verb.name, limit, process, pairs=listed)
            except TimeoutError as error:
                state = await self._check_apart(process)
                if state in verb.done:
                    return
                then = f"its CUDA state is {state.name.lower()}" if state else "its CUDA state is unknown"
                raise refusals.hung(f"the {verb.name}", process, timeout_s, then) from error
            except Lost as lost:
                losses += not lost.by_us
                if losses >= _LOSSES or limit.left_s < _LEAST_S:
                    raise refusals.helper_died(f"the {verb.name}", process, str(lost)) from lost
                log.warning("%s of %s is repeated: %s", verb.name, called(process), lost)
                if await self.state(process, limit.left_s) in verb.done:
                    return
                continue
            if answer.get("gone"):
                raise refusals.gone(process)
            if "unusable" in answer:
                raise refusals.unusable(answer["unusable"])
            if not answer["error"]:
                return
            state = await self._check(process)
            if state in verb.done:
                return
            if not process.alive():
                raise refusals.gone(process)
            if answer["error"] == "CUDA_ERROR_OUT_OF_MEMORY" and verb is RESTORE and state is not State.FAILED:
                raise await self._out_of_memory(process, pairs)
            raise refusals.refused(verb, process, answer["error"], state, timeout_s)

    async def _ask(self, call: str, limit: _Limit, process: Process, **arguments: Any) -> dict[str, Any]:
        with limit.suspended():
            helper = await self._helpers.initialised()
        limit_s = limit.left_s
        if call == LOCK.name:  # the only operation with a time limit of the driver's own
            arguments["timeout_ms"] = max(1, round(limit_s * 1000))
            limit_s += _GRACE_S
        answer = await helper.ask(call, limit_s, pid=process.pid, start_ticks=process.start_ticks, **arguments)
        if "unusable" in answer:
            helper.retire()  # libcuda never retries in the same process
        return answer

    def _state_in(self, answer: dict[str, Any], process: Process) -> State | None:
        if answer.get("gone"):
            return None
        if "unusable" in answer:
            if not answer["no_gpu"]:
                raise refusals.unusable(answer["unusable"])
            self._no_gpu, self._no_gpu_until = answer["unusable"], time.monotonic() + NO_GPU_KEPT_S
            _refuse_if_it_uses_cuda(process, self._no_gpu)
            return None
        if answer["error"]:
            if answer["error"] == "CUDA_ERROR_NOT_INITIALIZED" or not process.alive():
                return None
            raise refusals.state_unknown(process, answer["error"])
        return State(answer["state"])

    async def _check(self, process: Process) -> State | None:
        """The state for an error message; None also if it cannot be read."""
        try:
            return await self.state(process, _CHECK_S)
        except (GpuFailed, Timeout) as error:
            log.warning("%s", error.message)
            return None

    async def _check_apart(self, process: Process) -> State | None:
        """The same after a call that hung, with a separate helper: if this hangs too, no other call is affected."""
        with contextlib.suppress(TimeoutError, Lost, GpuFailed):
            async with self._helpers.apart() as helper:
                answer = await helper.ask("state", _CHECK_S, pid=process.pid, start_ticks=process.start_ticks)
            return self._state_in(answer, process)
        return None

    async def _out_of_memory(self, process: Process, pairs: Sequence[Pair]) -> SnapshotError:
        wanted = {pair.new_uuid for pair in pairs}
        gpus = (await self.inventory()).gpus
        return refusals.out_of_memory(process, [gpu for gpu in gpus if not wanted or gpu.uuid in wanted])


def _refuse_if_it_uses_cuda(process: Process, reason: str) -> None:
    """Without a driver no process has a CUDA state. A process whose GPU was lost must not look the same."""
    if library.holds_cuda(process.pid):
        raise refusals.unusable(f"{called(process)} uses CUDA, but the driver cannot be used: {reason}")
