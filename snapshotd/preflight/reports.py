"""What the CUDA driver and the shims report about a rank. It is collected before the inspection, which only reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.inprocess import ncclctl
from snapshotd.proc import maps
from snapshotd.proc.files import GONE


@dataclass(frozen=True)
class DriverReport:
    """The GPUs of this node and the tree's CUDA processes, as the driver reported them just before the inspection."""

    driver_version: str
    gpus: tuple[pb.Gpu, ...]  # of the node, in the driver's order
    cuda_pids: tuple[int, ...]  # processes of the tree that hold CUDA, as the daemon numbers them
    problem: str = ""  # why the node's GPUs could not be listed
    lost: tuple[pb.Gpu, ...] = ()  # that were there since the node booted: a process may still know them


@dataclass(frozen=True)
class NcclReports:
    """The processes that have communicators, and what their shims report about them."""

    reports: tuple[tuple[int, ncclctl.Report], ...] = ()
    problem: str = ""  # why a process could not be asked
    remedy: str = ""
    past: tuple[
        tuple[int, int], ...
    ] = ()  # processes with threads of NCCL and no communicator of the shim: pid, threads
    neighbours: tuple[tuple[int, int], ...] = ()  # other ranks of the job on this node: rank, and pid of each process

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(pid for pid, _ in self.reports)


def read_nccl_reports(pids: Sequence[int], neighbours: Sequence[tuple[int, int]] = ()) -> NcclReports:
    """Asks the shim of every process that has NCCL loaded. Nothing is changed. Blocking."""
    try:
        found = [(process.pid, report) for process, report in ncclctl.all_reports(pids)]
    except SnapshotError as error:
        return NcclReports(problem=error.message, remedy=error.advice)
    return NcclReports(
        tuple(each for each in found if each[1].concerned or each[1].rdma),
        past=tuple((pid, report.strange_threads) for pid, report in found if report.strange_threads),
        neighbours=tuple(neighbours),
    )


def uses_cuda(pids: Iterable[int]) -> list[int]:
    """The processes that have libcuda loaded; the driver has to be asked about these. Blocking, about 1 ms each."""
    found = []
    for pid in pids:
        try:
            if b"/libcuda.so" in maps.read_raw(pid):
                found.append(pid)
        except GONE:
            continue
    return found
