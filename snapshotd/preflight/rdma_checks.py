"""Whether RDMA devices (InfiniBand, RoCE) that a rank has open will be closed before it is dumped: NCCL's own are.

NCCL never closes them itself. The shim knows which library opened a device, and closes those of NCCL when its communicators
are down; a fresh copy of NCCL opens the target's. Invariant: a device whose owner is not known is refused, as is one of
another library, which would go on using it. After the freeze none may be left.
"""

from __future__ import annotations

import os
import re

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess.ncclctl import RdmaDevice
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import is_rdma
from snapshotd.preflight.process_info import ProcessInfo
from snapshotd.preflight.verdict import listed, passed, refused

_NVSHMEM = "start the job with NVSHMEM_REMOTE_TRANSPORT=none, or move it when NVSHMEM is finalised"
#: Libraries that use RDMA, by how their names begin, and how to keep them from doing so. The first that matches is named.
_USERS: tuple[tuple[str, str], ...] = (
    ("libnccl-net", "start the job with NCCL_NET_PLUGIN=none: NCCL then uses its own support for InfiniBand and RoCE"),
    (
        "libnccl",
        "start the job with `migrator run`, and load NCCL through the dynamic linker (no dlmopen, no RTLD_DEEPBIND)",
    ),
    ("libnvshmem", _NVSHMEM),
    ("nvshmem_transport", _NVSHMEM),
    ("libuc", "start the job with UCX_TLS=tcp,self,sm,cuda_copy,cuda_ipc"),
    ("libfabric", "start the job with FI_PROVIDER=tcp"),
    ("libmpi", "start the job with OMPI_MCA_btl=^openib and UCX_TLS=tcp,self,sm"),
    ("libsharp", "start the job with NCCL_COLLNET_ENABLE=0"),
    ("libgdrapi", "start the job with NCCL_GDRCOPY_ENABLE=0 and UCX_TLS without gdr_copy"),
)
_CLOSE = "close the device before the move, or turn RDMA off for the job (NCCL_IB_DISABLE=1, UCX_TLS without rc and gdr_copy)"
_LIBRARY = re.compile(r"/[^/]+\.so[^/]*$")


def rdma(rank: Inspection) -> Check:
    """For every rank. Also after the freeze, when no report is given and every device is refused."""
    reports = {} if rank.nccl is None else dict(rank.nccl.reports)
    foreign: list[tuple[str, str]] = []
    devices = set()
    for process in rank.tree.alive:
        report = reports.get(process.pid)
        known = {number: device for device in (report and report.rdma) or () for number in device.descriptors}
        ours = {number for number, device in known.items() if device.nccl}
        others = _foreign(process, ours)
        foreign += [(text, _owner(process, known.get(number))) for number, text in others]
        devices |= {(process.pid, device.device) for device in known.values() if device.nccl}
    if rank.frozen and foreign:
        return refused(
            "rdma",
            f"the rank still has RDMA devices open, which cannot be moved: {_named(foreign)}",
            "a plain retry is safe; if it happens again, see `migrator check`",
        )
    if foreign:
        return refused(
            "rdma",
            f"the rank has RDMA devices open that NCCL did not open, so they cannot be closed: {_named(foreign)}",
            _remedy([owner for _, owner in foreign]),
        )
    if devices:
        return passed("rdma", f"{len(devices)} devices of NCCL, which are closed when its communicators are taken down")
    return passed("rdma", "no RDMA device open")


def nccl_devices(rank: Inspection) -> list[str]:
    """The names of the devices that NCCL has open in the rank."""
    reports = rank.nccl.reports if rank.nccl is not None else ()
    return sorted({device.device for _, report in reports for device in report.rdma or () if device.nccl})


def _foreign(process: ProcessInfo, ours: set[int]) -> list[tuple[int, str]]:
    """The descriptors of RDMA that are not NCCL's; a mapping without a descriptor of its device has number -1."""
    others: list[tuple[int, str]] = []
    covered = set()
    for descriptor in process.descriptors:
        if is_rdma(descriptor.link):
            covered.add(descriptor.link)
            if descriptor.number not in ours:
                others.append((descriptor.number, f"{process} fd {descriptor.number}: {descriptor.link}"))
    mapped = sorted({mapping.path for mapping in process.mappings if is_rdma(mapping.path)} - covered)
    return others + [(-1, f"{process} maps {path}") for path in mapped]


def _owner(process: ProcessInfo, device: RdmaDevice | None) -> str:
    """The name of the library that opened a device; "" if it is not known and no loaded library is known to use RDMA."""
    if device is not None:
        return os.path.basename(device.owner)
    loaded = {os.path.basename(mapping.path) for mapping in process.mappings if _LIBRARY.search(mapping.path)}
    for begins, _ in _USERS:
        if begins != "libnccl" and (found := sorted(name for name in loaded if name.startswith(begins))):
            return f"probably {found[0]}"
    return ""


def _named(foreign: list[tuple[str, str]]) -> str:
    return listed([f"{text}, opened by {owner or 'a library that is not known'}" for text, owner in foreign])


def _remedy(owners: list[str]) -> str:
    for begins, remedy in _USERS:
        if any(owner.removeprefix("probably ").startswith(begins) for owner in owners):
            return remedy
    return _CLOSE
