"""Checks of a rank that uses NCCL: whether all its communicators can be torn down and built again.

What only the process knows was read from its shim before and is passed in as NcclReports. Invariant: a rank whose NCCL
calls bypass the shim is refused, because nothing would close its sockets and end its threads.
"""

from __future__ import annotations

import os
import re

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.elf import needed_libraries
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.process_info import ProcessInfo
from snapshotd.preflight.reports import NcclReports
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import comm, environ, maps

#: Settings of features that may keep something when communicators are destroyed; `migrator run --nccl-safe` makes them 0.
SETTINGS = ("NCCL_RAS_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_HOST_ENABLE")
#: The one that certainly does, and which `migrator run` sets to 0 unless the user has set it.
RAS = "NCCL_RAS_ENABLE"
#: The version from which on the shim can end RAS.
RAS_ENDS = 22800

_LIBRARY = "libnccl"
_TORCH = "libtorch_cuda.so"
#: NCCL's own threads for a communicator, and the ones torch adds.
_THREAD = re.compile(r"NCCL (Progress|Service|UDS)|pt_nccl_")


def communicators(rank: Inspection, nccl: NcclReports) -> Check:
    if nccl.problem:
        return refused("nccl", nccl.problem, nccl.remedy)
    found = [f"process {pid}, communicator {reason}" for pid, report in nccl.reports for reason in report.refusals()]
    if found:
        return refused(
            "nccl",
            f"some communicators cannot be torn down: {listed(found)}",
            "stop using what is named here, or retry when it has ended; shim/README.md lists what can be moved",
        )
    unseen = [
        f"{process}: {name}"
        for process in rank.tree.alive
        if process.pid not in nccl.pids and _maps(process, _LIBRARY)
        for name in sorted({name for name in _threads(process) if _THREAD.match(name)})
    ]
    unseen += [f"process {pid}: {threads} threads" for pid, threads in nccl.past]
    if unseen:
        return refused(
            "nccl",
            f"NCCL threads run in processes for which the shim knows no communicator: {listed(unseen)}",
            "start the job with `migrator run`, and let the program call NCCL as the dynamic linker resolves it: not through"
            " ctypes.CDLL (as vLLM's pynccl does), dlmopen or RTLD_DEEPBIND",
        )
    count = len({one.id for _, report in nccl.reports for one in report.comms})
    return passed("nccl", f"{count} communicators, in {len(nccl.reports)} processes" if count else "not in use")


def static(rank: Inspection) -> Check:
    """The shim cannot interpose NCCL that is linked statically into another library."""
    without = [process for process in rank.tree.alive if not _maps(process, _LIBRARY)]
    running = [f"{process}: {name}" for process in without for name in _threads(process) if _THREAD.match(name)]
    remedy = "use a build of torch that links libnccl.so.2 dynamically (the wheels on PyPI do)"
    if running:
        return refused(
            "nccl-static",
            f"NCCL threads run in processes that have no libnccl.so loaded: {listed(sorted(set(running)))}",
            remedy,
        )
    for process, mapping in _mapped_torch(without):
        try:
            needed = needed_libraries(process.pid, mapping)
        except PermissionError:
            return warned(
                "nccl-static",
                f"{process} has mapped {mapping.path}, which its user may not read: it was not examined",
                remedy,
            )
        if not any(name.startswith(_LIBRARY) for name in needed):
            return warned(
                "nccl-static",
                f"{mapping.path} contains NCCL: as soon as the rank uses it, the rank cannot be moved",
                remedy,
            )
    return passed("nccl-static", "NCCL is not linked statically")


def _mapped_torch(processes: list[ProcessInfo]) -> list[tuple[ProcessInfo, maps.Mapping]]:
    """Each distinct file of torch's CUDA library that they map, once: forked workers map the same one."""
    found = {
        (mapping.device, mapping.inode): (process, mapping)
        for process in processes
        for mapping in process.mappings
        if os.path.basename(mapping.path) == _TORCH
    }
    return list(found.values())


def environment(rank: Inspection, nccl: NcclReports) -> Check:
    """The settings of features that may keep something, as the processes were started. What they really keep is looked at
    during a move (snapshotd/moves/nccl/leftovers.py)."""
    if not nccl.reports:
        return passed("nccl-environment", "not in use")
    variables = [environ.read(pid) for pid in nccl.pids]
    values = {name: {one.get(name, "") for one in variables} for name in SETTINGS}
    shown = ", ".join(
        f"{name}={'|'.join(value or 'not set' for value in sorted(found))}" for name, found in values.items()
    )
    if values[RAS] - {"0"} and any(report.version < RAS_ENDS for _, report in nccl.reports):
        return warned(
            "nccl-environment",
            f"{shown}: the RAS of NCCL before 2.28, if it is on, keeps a thread and sockets when its communicators are"
            " destroyed, and the move is undone",
            f"start the job without setting {RAS}: `migrator run` sets it to 0; or with `migrator run --nccl-safe`",
        )
    return passed("nccl-environment", shown)


def _maps(process: ProcessInfo, beginning: str) -> bool:
    return any(os.path.basename(mapping.path).startswith(beginning) for mapping in process.mappings)


def _threads(process: ProcessInfo) -> list[str]:
    return list(comm.thread_names(process.pid).values())
