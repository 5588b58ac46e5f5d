"""The CUDA driver's checkpoint verbs for processes of this node, each bounded in time, and the node's GPUs.

Every verb is idempotent: it returns when its state holds, whoever brought that about. A call that hangs costs the
helper process and nothing else: it is killed, the other calls in flight look at their process's state and are asked
again. The driver finishes a checkpoint or restore it has begun even if nobody waits for it, and a lock that was given
up may land later; so an error here never means "it did not happen": what holds is what `state` says.

The daemon itself loads neither libcuda nor NVML.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout
from snapshotd.cuda import library, refusals
from snapshotd.cuda.inventory import Inventory, Lookout
from snapshotd.cuda.link import Lost
from snapshotd.cuda.links import Links
from snapshotd.cuda.refusals import called
from snapshotd.cuda.verbs import CHECKPOINT, LOCK, RESTORE, UNLOCK, Pair, State, Verb
from snapshotd.proc.tree import Process

__all__ = ["Gpus", "Pair", "State"]

log = logging.getLogger(__name__)

STATE_S = 5.0  # a running process answers in milliseconds
NO_GPU_KEPT_S = 30.0  # how long "there is no GPU here" is believed
_GRACE_S = 2.0  # how much longer than the driver we wait for a lock
_LOOK_S = 2.0  # for the state that an error tells
_LOSSES = 3  # a helper that dies this often in one call dies of it
_LEAST_S = 0.25  # with less time left nothing is asked again: it would only kill the next helper


class _Limit:
    """What is left of a call's time. It stands still while a helper is being started, which is not the call's doing."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._ends += time.monotonic() - began


class Gpus:
    """The node's GPUs. One per daemon; starts its helper when it is first needed, and none where there is no driver."""

    def __init__(self, library_dir: str = "") -> None:
        self._library_dir = library_dir
        self._links = Links(library_dir)
        self._lookout = Lookout(self._links, library_dir)
        self._no_gpu = ""  # why
        self._no_gpu_until = 0.0

    @property
    def available(self) -> bool:
        """Whether processes of this node can use CUDA, as far as that can be told without asking the driver."""
        return time.monotonic() >= self._no_gpu_until and library.found(library.CUDA, self._library_dir)

    async def close(self) -> None:
        """Ends the helper for good: whoever still waits for an answer, or asks, gets GpuFailed."""
        await self._links.close()
        await self._lookout.close()

    async def inventory(self, *, fresh: bool = False) -> Inventory:
        """The node's GPUs now, give or take a second unless `fresh`. Never raises: what cannot be told is its `problem`."""
        return await self._lookout.now(fresh=fresh)

    async def state(self, process: Process, timeout_s: float = STATE_S) -> State | None:
        """The state the driver has for the process; None when it does not use CUDA, or is gone.

        Raises Timeout when it does not answer (a stopped process never does; one in the middle of a checkpoint answers
        when that is done), GpuFailed when the driver cannot be asked.
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
        _refuse_if_it_uses_cuda(process, self._no_gpu or f"{library.CUDA} is not there")
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

    # ------------------------------------------------------------ how

    async def _reach(self, verb: Verb, process: Process, timeout_s: float, pairs: Sequence[Pair] = ()) -> None:
        limit = _Limit(timeout_s)
        listed = [(pair.old_uuid, pair.new_uuid) for pair in pairs]
        losses = 0
        while True:
            try:
                answer = await self._ask(verb.name, limit, process, pairs=listed)
            except TimeoutError as error:
                state = await self._look_apart(process)
                if state in verb.done:
                    return
                then = f"its CUDA state is {state.name.lower()}" if state else "its CUDA state cannot be learned either"
                raise refusals.hung(f"the {verb.name}", process, timeout_s, then) from error
            except Lost as lost:
                losses += not lost.by_us
                if losses >= _LOSSES or limit.left_s < _LEAST_S:
                    raise refusals.helper_died(f"the {verb.name}", process, str(lost)) from lost
                log.warning("%s of %s is asked for again: %s", verb.name, called(process), lost)
                if await self.state(process, limit.left_s) in verb.done:
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
            if answer["error"] == "CUDA_ERROR_OUT_OF_MEMORY" and verb is RESTORE and state is not State.FAILED:
                raise await self._out_of_memory(process, pairs)
            raise refusals.refused(verb, process, answer["error"], state, timeout_s)

    async def _ask(self, call: str, limit: _Limit, process: Process, **arguments: Any) -> dict[str, Any]:
        with limit.standing_still():
            link = await self._links.initialised()
        limit_s = limit.left_s
        if call == LOCK.name:  # the one verb whose time the driver keeps itself
            arguments["timeout_ms"] = max(1, round(limit_s * 1000))
            limit_s += _GRACE_S
        answer = await link.ask(call, limit_s, pid=process.pid, start_ticks=process.start_ticks, **arguments)
        if "unusable" in answer:
            link.retire()  # libcuda never tries again in the same process
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
            async with self._links.apart() as link:
                answer = await link.ask("state", _LOOK_S, pid=process.pid, start_ticks=process.start_ticks)
            return self._state_in(answer, process)
        return None

    async def _out_of_memory(self, process: Process, pairs: Sequence[Pair]) -> SnapshotError:
        wanted = {pair.new_uuid for pair in pairs}
        gpus = (await self.inventory()).gpus
        return refusals.out_of_memory(process, [gpu for gpu in gpus if not wanted or gpu.uuid in wanted])


def _refuse_if_it_uses_cuda(process: Process, words: str) -> None:
    """Without a driver no process has a state, but for one whose GPU went away under it: that must not look the same."""
    if library.holds_cuda(process.pid):
        raise refusals.unusable(f"{called(process)} uses CUDA, but the driver cannot be asked: {words}")
