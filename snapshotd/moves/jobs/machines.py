"""Whether a machine is there although its daemon does not answer: then its ranks may run."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from enum import Enum

from snapshotd.api.addresses import split_address
from snapshotd.proc import host

PROBE_S = 3.0
#: How much longer it may take to find the address of a name: a resolver asks its next server after 5 s.
NAME_S = 12.0
#: A time-out that comes so much too late says that this machine stood still, and nothing about the other one.
LATE_S = 0.5
#: How often a probe is made again that came to nothing because this machine was busy.
_TRIES = 3
#: Errors of a connection to a machine that is not there.
_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
#: Errors of an address that this machine cannot use, such as one of IPv6 where that is off. The name may have others.
_UNUSABLE = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL}


async def answers(endpoint: str, limit_s: float = PROBE_S, *, if_unknown: bool = False) -> bool:
    """Whether a machine is there, at least to refuse the connection: then its daemon is down, and its ranks may run.
    `if_unknown`: the answer if this machine could not find out: it lacks descriptors, does not find the address of a name, or
    stood still itself."""
    name, port = split_address(endpoint)
    said: list[Said] = []
    try:
        async with asyncio.timeout(_TRIES * limit_s + NAME_S if if_unknown else limit_s):
            found = await _addresses_of(name, port)
            for _ in range(_TRIES):
                said = await asyncio.gather(*(_probe(address, port, limit_s) for address in found))
                if Said.LATE not in said or Said.THERE in said:
                    break
    except (OSError, TimeoutError):
        return if_unknown
    if Said.THERE in said:
        return True
    is_silent = set(said) <= {Said.SILENT, Said.UNUSABLE} and Said.SILENT in said
    return if_unknown and not is_silent


async def _addresses_of(name: str, port: int) -> list[str]:
    try:
        return [str(ipaddress.ip_address(name))]
    except ValueError:
        pass
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(one[4][0]) for one in found})


class Said(Enum):
    """What a probe of one address has found."""

    THERE = "it answers"
    SILENT = "it does not"
    LATE = "this machine stood still"
    UNUSABLE = "this machine cannot use the address"
    UNKNOWN = "this machine could not find out"


async def _probe(address: str, port: int, limit_s: float) -> Said:
    began_s = host.boottime_s()
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return Said.THERE
    except TimeoutError:
        return Said.SILENT if host.boottime_s() - began_s < limit_s + LATE_S else Said.LATE
    except OSError as error:
        if error.errno in _SILENT:
            return Said.SILENT
        return Said.UNUSABLE if error.errno in _UNUSABLE else Said.UNKNOWN
    writer.close()
    return Said.THERE


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
