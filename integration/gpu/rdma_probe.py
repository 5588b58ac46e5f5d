"""Shows within a minute what NCCL leaves of RDMA in a process, and that the shim closes it.

    integration/gpu/run --exec python3 -m integration.gpu.rdma_probe

A rank of world size 1 runs with the machine's real NCCL, the preloaded shim and the fake libibverbs (tests/fakes/verbs), of
which a device is a file. The probe does the steps of a move without daemons, lab and CRIU, and prints after each what the
process has of RDMA: descriptors, mappings, and threads of NCCL. The first line that is not `ok` names the part that fails.
With DEVICE=cpu it uses the fake NCCL, without torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from integration.gpu.nccl_probe import START_S, STEP_S, Failed, Rank, attach, close, ending, open_gate, probe, report
from snapshotd.inprocess import ncclctl
from tests.fakes import verbs_fake

#: NCCL expects a PCI path of each device if there are several, and the fake has none in /sys.
DEVICES = 1
VARIABLES = {
    **verbs_fake.REAL_NCCL,
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "NCCL_SET_THREAD_NAME": "1",
    "FAKE_NCCL_NET": "IB",
    "FAKE_VERBS_ADDR": "127.0.0.1",
}


def start(folder: Path) -> Rank:
    return Rank(folder, verbs_fake.with_devices(DEVICES), [str(verbs_fake.build())], **VARIABLES)


def held(rank: Rank) -> list[str]:
    pid = rank.started.pid
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(f"fd {one.name} {os.readlink(one)}")
    found += [f"maps {line.split()[-1]}" for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sorted(text for text in found if verbs_fake.FOLDER in text)


def left(rank: Rank) -> str:
    answer = report(rank)
    devices = [f"{one.device} of {os.path.basename(one.owner)}, nccl={one.nccl}" for one in answer.rdma or ()]
    return f"{', '.join(held(rank)) or 'nothing of RDMA'}; {answer.threads} threads of NCCL; the shim knows: {devices}"


def network(rank: Rank) -> str:
    """What NCCL says about its network."""
    rank.goes_on(START_S)
    if not held(rank):
        raise Failed("NCCL has opened no RDMA device")
    said = [line.strip() for line in rank.text().splitlines() if re.search(r"NET/IB|Using network|IbAsync", line)]
    return "\n         ".join([left(rank), *said[:12]])


def take_down(rank: Rank) -> str:
    ncclctl.detach(rank.process(), [comm.id for comm in report(rank).comms], STEP_S)
    if not held(rank):
        raise Failed("NCCL has closed its devices by itself")
    return f"after the last communicator: {left(rank)}"


def close_devices(rank: Rank) -> str:
    ncclctl.close_devices(rank.process(), STEP_S)
    found = report(rank)
    if held(rank) or found.threads:
        raise Failed(f"something is left: {left(rank)}")
    said = [line.strip() for line in rank.text().splitlines() if "ibv_get_async_event" in line]
    return "\n         ".join([left(rank), *said])


def fresh(rank: Rank) -> str:
    """The next all-reduce is done by a fresh copy, which has opened the devices again."""
    before = report(rank).instance
    text = attach(rank)
    after = report(rank).instance
    if after == before or not held(rank):
        raise Failed(f"instance {after} after instance {before}: {left(rank)}")
    return f"{text}; instance {after}: {left(rank)}"


STEPS = {
    "NCCL uses RDMA": network,
    "close the gate": close,
    "take down": take_down,
    "close the devices": close_devices,
    "build again": fresh,
    "open the gate": open_gate,
    "again: close": close,
    "again: take down": take_down,
    "again: close the devices": close_devices,
    "again: build": fresh,
    "again: open": open_gate,
    "end": ending,
}


if __name__ == "__main__":
    sys.exit(probe(start, STEPS))
