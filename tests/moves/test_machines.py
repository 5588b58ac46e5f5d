"""A machine is not silent because this one cannot find out: that would have ranks run twice."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from snapshotd.moves.jobs import machines
from snapshotd.moves.jobs.machines import answers

#: Where no machine is: a packet to it is dropped (RFC 6666).
NOWHERE = "[100::1]:7070"


@pytest.fixture
async def there() -> AsyncIterator[int]:
    """The port of something that listens on this machine."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is answered by nobody."""

    async def never(*_args: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio, "open_connection", never)


async def both(endpoint: str, limit_s: float = machines.PROBE_S) -> tuple[bool, bool]:
    """What is said if nothing is known, without and with `if_unknown`."""
    return await answers(endpoint, limit_s), await answers(endpoint, limit_s, if_unknown=True)


async def test_machine_is_there_if_it_accepts_or_refuses_a_connection(there: int) -> None:
    assert await both(f"127.0.0.1:{there}") == (True, True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert await both(f"127.0.0.1:{port}") == (True, True)


async def test_machine_is_silent_if_no_answer_comes(waits: None) -> None:
    assert await both(NOWHERE, 0.05) == (False, False)


@pytest.mark.parametrize(("times", "known"), [(1, True), (9, False)])
async def test_probe_in_which_this_machine_stood_still_is_made_again(
    monkeypatch: pytest.MonkeyPatch, times: int, known: bool
) -> None:
    left = [times]

    async def stands_still(*_args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            time.sleep(machines.LATE_S + 0.3)
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio, "open_connection", stands_still)
    assert await answers(NOWHERE, 0.05, if_unknown=True) != known


async def test_nothing_is_known_if_a_name_is_not_found(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_args: Any, **_options: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    assert await both(f"node-7:{there}") == (False, True)


async def test_slow_name_server_does_not_make_a_machine_silent(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*_args: Any, **_options: Any) -> Any:
        await asyncio.sleep(0.2)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", there))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", slow)
    assert await both(f"node-7:{there}", 0.1) == (False, True), "who cannot wait is told at once"


async def test_address_that_this_machine_cannot_use_says_nothing(waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have one of IPv6, which is off here: its machine is lost all the same."""
    others = asyncio.open_connection

    async def off(address: str, port: int) -> Any:
        if ":" in address:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return await others(address, port)

    async def names(*_args: Any, **_options: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in found]

    monkeypatch.setattr(asyncio, "open_connection", off)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names)
    found = ["10.0.0.7", "fd00::7"]
    assert await both("node-7:1", 0.05) == (False, False)
    found = ["fd00::7"]
    assert await both("node-7:1", 0.05) == (False, True), "no address was tried"


async def test_nothing_is_known_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", full)
    assert await both(NOWHERE) == (False, True)
