"""Has rank 0 of a protected job host the store of torch, where torchrun would do it.

With `--master-addr`, and without any option, torchrun's launcher hosts the store of its ranks. A job is rolled back with its
store or not at all: what its ranks have counted there since the snapshot would be counted twice. So the ranks are told, as
torchrun tells them otherwise, that rank 0 hosts it. Its port follows from that of the launcher, because all ranks must
know it before one of them runs.

Only the standard library is imported, because this runs in front of every rank.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

#: What torchrun sets: "True" if its launcher hosts the store.
LAUNCHER_HOSTS, PORT = "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"
#: Below the ports that Linux gives to outgoing connections.
_FIRST, _COUNT = 20_000, 10_000


class PortInUse(Exception):
    """Rank 0 could not host the store."""


def of_rank_0(environment: Mapping[str, str], rank: int) -> dict[str, str]:
    """The rank's environment with which rank 0 hosts the store. Raises PortInUse, on rank 0."""
    made, port = dict(environment), environment.get(PORT, "")
    if environment.get(LAUNCHER_HOSTS) != "True" or not (port.isascii() and port.isdecimal()):
        return made
    own = port_for(int(port))
    if rank == 0 and not _is_free(own):
        raise PortInUse(
            f"port {own} is in use; with --master-port {port}, rank 0 of a protected job hosts its store there: choose"
            " another --master-port, or use --rdzv-backend c10d --rdzv-endpoint HOST:PORT, which finds a free port"
        )
    return made | {LAUNCHER_HOSTS: "False", PORT: str(own)}


def port_for(launchers: int) -> int:
    """Never that port itself. Neighbours get neighbours, so that jobs with different ports do not meet."""
    return _FIRST + (launchers + _COUNT // 2) % _COUNT


def _is_free(port: int) -> bool:
    """Whether torch can listen there, on all addresses."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((address, port))
                return True
        except OSError:
            continue
    return False
