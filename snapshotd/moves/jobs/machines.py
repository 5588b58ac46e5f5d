"""Whether a machine is there although its daemon does not answer: then its ranks may run."""

from __future__ import annotations

import asyncio
import errno

from snapshotd.api.addresses import split_address

PROBE_S = 3.0
#: Errors of a connection to a machine that is not there.
_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


async def answers(endpoint: str, limit_s: float = PROBE_S, *, if_unknown: bool = False) -> bool:
    """Whether a machine is there, at least to refuse the connection: then its daemon is down, and its ranks may run.
    `if_unknown`: the answer if this machine could not ask, because it lacks descriptors, say."""
    address, port = split_address(endpoint)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    except OSError as error:
        return if_unknown and error.errno not in _SILENT
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
