"""Whether a machine is there although its daemon does not answer: then its ranks may run."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket

from snapshotd.api.addresses import split_address
from snapshotd.proc import host

PROBE_S = 3.0
#: How much longer it may take to find the address of a name: a resolver asks its next server after 5 s.
NAME_S = 12.0
#: A time-out that comes so much too late says that this machine stood still, and nothing about the other one.
LATE_S = 0.5
#: Errors of a connection to a machine that is not there.
_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


async def answers(endpoint: str, limit_s: float = PROBE_S, *, if_unknown: bool = False) -> bool:
    """Whether a machine is there, at least to refuse the connection: then its daemon is down, and its ranks may run.
    `if_unknown`: the answer if this machine could not find out: it lacks descriptors, does not find the address of a name, or
    stood still itself."""
    name, port = split_address(endpoint)
    try:
        async with asyncio.timeout(limit_s + NAME_S if if_unknown else limit_s):
            found = await _addresses_of(name, port)
            said = await asyncio.gather(*(_is_there(address, port, limit_s) for address in found))
    except (OSError, TimeoutError):
        return if_unknown
    return any(said) or (if_unknown and None in said)


async def _addresses_of(name: str, port: int) -> list[str]:
    try:
        return [str(ipaddress.ip_address(name))]
    except ValueError:
        pass
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(one[4][0]) for one in found})


async def _is_there(address: str, port: int, limit_s: float) -> bool | None:
    """None: this machine could not find out."""
    began_s = host.boottime_s()
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return True
    except TimeoutError:
        return False if host.boottime_s() - began_s < limit_s + LATE_S else None
    except OSError as error:
        return False if error.errno in _SILENT else None
    writer.close()
    return True


async def refuses(endpoint: str, limit_s: float = PROBE_S) -> bool:
    """Whether a machine is there and refuses the connection: no daemon listens."""
    address, port = split_address(endpoint)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
