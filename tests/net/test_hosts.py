"""The hosts of the network tests reach each other over both families at once, and have a loopback."""

from __future__ import annotations

import socket

import pytest

from tests.net.hosts import Hosts

pytestmark = pytest.mark.root


@pytest.mark.parametrize("family", ["ip4", "ip6"])
def test_every_host_reaches_every_other(hosts: Hosts, family: str) -> None:
    for listener in hosts:
        address = getattr(listener, family)
        with listener.call(_listen, address) as server:
            for caller in hosts:
                with caller.call(socket.create_connection, (address, server.getsockname()[1]), 2.0) as client:
                    served, peer = server.accept()
                    served.close()
                    assert peer[0] == (address if caller is listener else getattr(caller, family))
                    assert client.getpeername()[0] == address


def test_program_runs_inside_a_host(hosts: Hosts) -> None:
    source = "import socket; s = socket.create_server(('127.0.0.1', 7)); print(s.getsockname()[1], flush=True); input()"
    with hosts.h1.python(source) as first, hosts.h2.python(source) as second:  # the same port on two loopbacks
        assert first.stdout.readline() == second.stdout.readline() == "7\n"
        hosts.h1.call(socket.create_connection, ("127.0.0.1", 7), 2.0).close()
        with pytest.raises(ConnectionRefusedError):
            hosts.h3.call(socket.create_connection, ("127.0.0.1", 7), 2.0)


def _listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
