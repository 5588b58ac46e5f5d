"""Checks of a rank that uses NCCL: whether all its communicators can be taken down and built again.

What only the process knows was asked of its shim before and is handed in as an NcclLook. Invariant: a rank whose NCCL the
shim does not see is refused, not moved with sockets and threads that nobody takes down.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotd.api.errors import SnapshotError
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import ncclctl
from snapshotd.preflight.look import Look
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.processes import Process, read_text

#: What `migrator run` sets where the user has not: each leaves something behind that a destroyed communicator does not take.
PRESETS = {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}

_LIBRARY = "libnccl"
_TORCH = "libtorch_cuda.so"
#: NCCL's own threads for a communicator, and torch's beside it.
_THREAD = re.compile(r"NCCL (Progress|Service|UDS)|pt_nccl_")


@dataclass(frozen=True)
class NcclLook:
    """The processes that have communicators, and what their shims say of them."""

    reports: tuple[tuple[int, ncclctl.Report], ...] = ()
    problem: str = ""  # why they could not be asked
    remedy: str = ""

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(pid for pid, _ in self.reports)


def look_at(pids: Sequence[int]) -> NcclLook:
    """Asks every process that has NCCL loaded; nothing is changed. Blocking."""
    try:
        return NcclLook(tuple((process.pid, report) for process, report in ncclctl.reports(pids)))
    except SnapshotError as error:
        return NcclLook(problem=error.message, remedy=error.advice)


def communicators(look: Look, nccl: NcclLook) -> Check:
    if nccl.problem:
        return refused("nccl", nccl.problem, nccl.remedy)
    found = [f"process {pid}, communicator {why}" for pid, report in nccl.reports for why in report.refusals()]
    if found:
        return refused(
            "nccl",
            f"communicators that cannot be taken down: {listed(found)}",
            "shim/README.md lists what moves: end what is named here, or move when it is over",
        )
    past = [
        f"{process}: {name}"
        for process in look.tree.alive
        if process.pid not in nccl.pids and _maps(process, _LIBRARY)
        for name in sorted({name for name in _threads(process) if _THREAD.match(name)})
    ]
    if past:
        return refused(
            "nccl",
            f"threads of NCCL in processes that have no communicator the shim knows of: {listed(past)}",
            "start the job with `migrator run`, and let it find NCCL by the dynamic linker (no dlmopen, no RTLD_DEEPBIND)",
        )
    count = len({comm.id for _, report in nccl.reports for comm in report.comms})
    return passed("nccl", f"{count} communicators, in {len(nccl.reports)} processes" if count else "not in use")


def static(look: Look) -> Check:
    """NCCL that is linked into another library is nobody's to interpose."""
    without = [process for process in look.tree.alive if not _maps(process, _LIBRARY)]
    running = [f"{process}: {name}" for process in without for name in _threads(process) if _THREAD.match(name)]
    remedy = "use a build of torch that links libnccl.so.2 (the wheels on PyPI do)"
    if running:
        return refused(
            "nccl-static", f"NCCL is at work, and not as a library of its own: {listed(sorted(set(running)))}", remedy
        )
    for process in without:
        for mapping in process.mappings:
            if os.path.basename(mapping.path) == _TORCH:
                library = f"/proc/{process.pid}/map_files/{mapping.span}"
                if not any(name.startswith(_LIBRARY) for name in needed(library)):
                    return warned(
                        "nccl-static",
                        f"{mapping.path} has NCCL inside it: once it is used the rank cannot move",
                        remedy,
                    )
                break
    return passed("nccl-static", "no NCCL but in its own library")


def environment(look: Look, nccl: NcclLook) -> Check:
    """The settings that the launcher presets, as the processes have them."""
    if not nccl.reports:
        return passed("nccl-environment", "not in use")
    settings = {name: {_variable(pid, name) for pid in nccl.pids} for name in PRESETS}
    shown = ", ".join(f"{name}={'|'.join(sorted(values)) or '-'}" for name, values in settings.items())
    wrong = [name for name, values in settings.items() if values - {PRESETS[name]}]
    if wrong:
        return warned(
            "nccl-environment",
            f"{shown}: what NCCL then keeps may outlast its communicators, and the freeze refuses it",
            f"start the job without setting {', '.join(wrong)}: `migrator run` presets what moves",
        )
    return passed("nccl-environment", shown)


def needed(library: str) -> list[str]:
    """The names that a 64-bit ELF file wants from the dynamic linker; none where it is no such file."""
    with open(library, "rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return []
        table_at, entry_bytes, entries = (*struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54))
        file.seek(table_at)
        table = file.read(entry_bytes * entries)
        segments = [struct.unpack_from("<IIQQQQ", table, index * entry_bytes) for index in range(entries)]
        dynamic = next(((at, size) for kind, _, at, _, _, size in segments if kind == 2), None)
        if dynamic is None:
            return []
        file.seek(dynamic[0])
        tags = list(struct.iter_unpack("<QQ", file.read(dynamic[1] // 16 * 16)))
        strings_at = next((value for tag, value in tags if tag == 5), 0)
        strings_bytes = next((value for tag, value in tags if tag == 10), 0)
        for kind, _, at, address, _, size in segments:
            if kind == 1 and address <= strings_at < address + size:
                file.seek(at + strings_at - address)
                strings = file.read(strings_bytes)
                return [
                    strings[value : strings.index(b"\0", value)].decode(errors="replace")
                    for tag, value in tags
                    if tag == 1
                ]
    return []


def _maps(process: Process, beginning: str) -> bool:
    return any(os.path.basename(mapping.path).startswith(beginning) for mapping in process.mappings)


def _threads(process: Process) -> list[str]:
    names = []
    for task in os.listdir(f"/proc/{process.pid}/task"):
        try:
            names.append(read_text(f"/proc/{process.pid}/task/{task}/comm").strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


def _variable(pid: int, name: str) -> str:
    for entry in read_text(f"/proc/{pid}/environ").split("\0"):
        key, _, value = entry.partition("=")
        if key == name:
            return value
    return ""
