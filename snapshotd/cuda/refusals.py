"""Error messages for a driver that refuses or does not answer: the process, the operation, the reason, the remedy.

`where` is unknown throughout: only the calling step knows where the rank is.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, Internal, RankGone, SnapshotError, Timeout, Where
from snapshotd.cuda.states import CHECKPOINT, LOCK, RESTORE, State, Verb
from snapshotd.proc import cgroup, comm, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process

_WAIT_FOR_KERNELS = "it may be in a long kernel or wait for a collective; retry"
_NOT_SUPPORTED = (
    "the likely causes are managed memory (cudaMallocManaged) and memory imported from another process "
    "(cudaIpcOpenMemHandle); the job cannot move while it uses them"
)
_UNKNOWN_GPU = (
    "the driver does not know one of the given GPUs, or not all GPUs of the source were given; "
    "`migrator nodes --json` lists them on both nodes"
)


def called(process: Process) -> str:
    """process 4711 (python3)"""
    name = comm.name_or(process.pid, "")
    return f"process {process.pid} ({name})" if name else f"process {process.pid}"


def gone(process: Process) -> RankGone:
    return RankGone(f"process {process.pid} is gone", where=Where.UNKNOWN)


def unusable(reason: str) -> GpuFailed:
    return GpuFailed(
        reason, remedy="check with `nvidia-smi` whether the driver of that node works", where=Where.UNKNOWN
    )


def helper_died(what: str, process: Process, reason: str) -> GpuFailed:
    return GpuFailed(f"the outcome of {what} of {called(process)} is unknown: {reason}", where=Where.UNKNOWN)


def state_unknown(process: Process, error: str) -> GpuFailed:
    return GpuFailed(f"the CUDA state of {called(process)} cannot be read: {error}", where=Where.UNKNOWN)


def hung(what: str, process: Process, timeout_s: float, then: str) -> Timeout:
    """No answer. The driver works inside the process, so the process's own condition is the best explanation; else `then`."""
    if held := _held(process):
        then = held
        remedy = "the driver works inside the process: the operation may still happen once the process can run"
    else:
        remedy = "check the GPU with `nvidia-smi` and the kernel log (Xid) of that node, then retry"
    message = f"the driver did not answer within {timeout_s:g} s ({what} of {called(process)})"
    return Timeout("; ".join(filter(None, [message, then])), remedy=remedy, where=Where.UNKNOWN)


def refused(verb: Verb, process: Process, error: str, state: State | None, timeout_s: float) -> SnapshotError:
    """The driver's error by its own name, with its cause if known."""
    name = called(process)
    if state is State.FAILED:
        return GpuFailed(
            f"the driver lost the process's device state: {verb.name} of {name} returned {error}",
            remedy="the process cannot continue: restart the job from its last checkpoint",
            where=Where.UNKNOWN,
        )
    if verb is LOCK and error == "CUDA_ERROR_NOT_READY":
        return Timeout(
            f"the GPU work of {name} did not finish in {timeout_s:g} s", remedy=_WAIT_FOR_KERNELS, where=Where.UNKNOWN
        )
    if error == "CUDA_ERROR_NOT_INITIALIZED":
        return GpuFailed(f"{name} does not use CUDA: there is nothing to {verb.name}", where=Where.UNKNOWN)
    message = f"the driver's {verb.name} of {name} failed: {error}"
    if verb is CHECKPOINT and error == "CUDA_ERROR_NOT_SUPPORTED":
        return GpuFailed(message, remedy=_NOT_SUPPORTED, where=Where.UNKNOWN)
    if verb is RESTORE and error == "CUDA_ERROR_INVALID_VALUE":
        return GpuFailed(message, remedy=_UNKNOWN_GPU, where=Where.UNKNOWN)
    if state is not None and error == "CUDA_ERROR_ILLEGAL_STATE":
        message += f" (it is {state.name.lower()}, not {verb.needs.name.lower()})"
    return GpuFailed(message, where=Where.UNKNOWN)


def out_of_memory(process: Process, gpus: Iterable[pb.Gpu]) -> GpuFailed:
    """`gpus`: those onto which the process was to be restored."""
    free = " or ".join(f"{gpu.index} ({gpu.name}, {gpu.memory_free_bytes / 2**30:.1f} GiB free)" for gpu in gpus)
    return GpuFailed(
        f"not enough free device memory on GPU {free or '(unknown)'}: "
        f"the driver's {RESTORE.name} of {called(process)} failed: CUDA_ERROR_OUT_OF_MEMORY",
        remedy="end other processes on that GPU (`nvidia-smi`), or choose another one with --gpu",
        where=Where.UNKNOWN,
    )


def _held(process: Process) -> str:
    """Why the process cannot run, "" if it can."""
    if not process.alive():
        return "the process has exited"
    if tree.stopped(process.pid):
        return "the process is stopped (SIGSTOP or a debugger)"
    try:
        return "its cgroup is frozen" if Cgroup(cgroup.of_process(process.pid)).frozen() else ""
    except (OSError, Internal):
        return ""
