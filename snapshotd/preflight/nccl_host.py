"""Checks whether NCCL will recognise that a moved rank is on another host.

A fresh copy of NCCL is loaded for a moved rank, so the host's name and boot id are read anew. NCCL_HOSTID, from the
environment, replaces both. It moves with the rank, and ranks with the same value are ranks of one host to NCCL: it
would connect them through memory that they do not share. A value that no other rank of the node has, as where several
ranks use one GPU, is harmless.
"""

from __future__ import annotations

import contextlib

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.reports import NcclReports
from snapshotd.preflight.verdict import listed, passed, refused
from snapshotd.proc import environ
from snapshotd.proc.files import GONE

VARIABLE = "NCCL_HOSTID"


def host_id(rank: Inspection, nccl: NcclReports) -> Check:
    mine = {value for pid in nccl.pids if (value := _value(pid))}
    if not mine:
        return passed("nccl-host-id", f"{VARIABLE} is not set")
    same = sorted({number for number, pid in nccl.neighbours if _value(pid) in mine})
    if same:
        return refused(
            "nccl-host-id",
            f"{VARIABLE}={', '.join(sorted(mine))[:80]} is set for this rank and for ranks that stay on this node:"
            f" {listed([str(number) for number in same])}; after the move NCCL would take them for ranks of one host",
            f"start the job without {VARIABLE}, or with a different value for each rank",
        )
    return passed("nccl-host-id", f"no other rank of the job here has the same {VARIABLE}")


def _value(pid: int) -> str:
    with contextlib.suppress(*GONE):
        return environ.read(pid).get(VARIABLE, "")
    return ""
