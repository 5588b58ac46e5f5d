"""What a person is told when the driver says no or nothing at all: which process, what was asked, why, what to do.

`where` is left unknown throughout: only the step that called knows where the rank is.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, Internal, RankGone, SnapshotError, Timeout, Where
from snapshotd.cuda.verbs import CHECKPOINT, LOCK, RESTORE, State, Verb
from snapshotd.proc import cgroup, comm, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process

_WAIT_FOR_KERNELS = "it may be inside a long kernel or wait for a collective; try again"
_NOT_SUPPORTED = (
    "the likely causes are managed memory (cudaMallocManaged) and memory imported from another process "
    "(cudaIpcOpenMemHandle); the job cannot move while it uses them"
)
_UNKNOWN_GPU = (
    "the driver does not know one of the GPUs it was told, or not all of the source's were told; "
    "`migrator nodes --json` lists them on both nodes"
)


def called(process: Process) -> str:
    """process 4711 (python3)"""
    name = comm.name_or(process.pid, "")
    return f"process {process.pid} ({name})" if name else f"process {process.pid}"


def gone(process: Process) -> RankGone:
    return RankGone(f"process {process.pid} is gone", where=Where.UNKNOWN)


def unusable(words: str) -> GpuFailed:
    return GpuFailed(words, remedy="`nvidia-smi` on that node says whether its driver works", where=Where.UNKNOWN)


def helper_died(asked: str, process: Process, words: str) -> GpuFailed:
    return GpuFailed(f"{asked} of {called(process)} is not known to have happened: {words}", where=Where.UNKNOWN)


def state_unknown(process: Process, error: str) -> GpuFailed:
    return GpuFailed(f"the driver does not tell the CUDA state of {called(process)}: {error}", where=Where.UNKNOWN)


def hung(asked: str, process: Process, timeout_s: float, then: str) -> Timeout:
    """Nothing came back. The driver works inside the process, so the process's own condition says most; else `then`."""
    if held := _held(process):
        then = held
        remedy = "the driver works inside the process: it answers, and may still do what was asked, once that can run"
    else:
        remedy = "`nvidia-smi` and the kernel's log (Xid) on that node say whether the GPU is well; try again"
    told = f"the driver did not answer within {timeout_s:g} s ({asked} of {called(process)})"
    return Timeout("; ".join(filter(None, [told, then])), remedy=remedy, where=Where.UNKNOWN)


def refused(verb: Verb, process: Process, error: str, state: State | None, timeout_s: float) -> SnapshotError:
    """The driver's error in its own name, and what is behind it where that is known."""
    who = called(process)
    if state is State.FAILED:
        return GpuFailed(
            f"the driver lost the process's device state: {verb.name} of {who} said {error}",
            remedy="the process cannot go on: start the job again from its last checkpoint",
            where=Where.UNKNOWN,
        )
    if verb is LOCK and error == "CUDA_ERROR_NOT_READY":
        return Timeout(
            f"the GPU work of {who} did not finish in {timeout_s:g} s", remedy=_WAIT_FOR_KERNELS, where=Where.UNKNOWN
        )
    if error == "CUDA_ERROR_NOT_INITIALIZED":
        return GpuFailed(f"{who} does not use CUDA: there is nothing to {verb.name}", where=Where.UNKNOWN)
    told = f"the driver's {verb.name} of {who} failed: {error}"
    if verb is CHECKPOINT and error == "CUDA_ERROR_NOT_SUPPORTED":
        return GpuFailed(told, remedy=_NOT_SUPPORTED, where=Where.UNKNOWN)
    if verb is RESTORE and error == "CUDA_ERROR_INVALID_VALUE":
        return GpuFailed(told, remedy=_UNKNOWN_GPU, where=Where.UNKNOWN)
    if state is not None and error == "CUDA_ERROR_ILLEGAL_STATE":
        told += f" (it is {state.name.lower()}, not {verb.needs.name.lower()})"
    return GpuFailed(told, where=Where.UNKNOWN)


def out_of_memory(process: Process, gpus: Iterable[pb.Gpu]) -> GpuFailed:
    """`gpus`: those the process was to be restored onto."""
    free = " or ".join(f"{gpu.index} ({gpu.name}, {gpu.memory_free_bytes / 2**30:.1f} GiB free)" for gpu in gpus)
    return GpuFailed(
        f"not enough free device memory on GPU {free or '(unknown)'}: "
        f"the driver's {RESTORE.name} of {called(process)} failed: CUDA_ERROR_OUT_OF_MEMORY",
        remedy="end what else uses that GPU (`nvidia-smi`), or choose another one with --gpu",
        where=Where.UNKNOWN,
    )


def _held(process: Process) -> str:
    """Why the process cannot run at all, "" if it can."""
    if not process.alive():
        return "the process has ended meanwhile"
    if tree.stopped(process.pid):
        return "the process is stopped (SIGSTOP or a debugger)"
    try:
        return "its cgroup is frozen" if Cgroup(cgroup.of_process(process.pid)).frozen() else ""
    except (OSError, Internal):
        return ""
