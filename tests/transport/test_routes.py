"""Several network interfaces: which address connects with which, and what a dead one costs."""

from __future__ import annotations

import socket

import pytest

from snapshotd.api.errors import Internal
from snapshotd.transport import sockets
from snapshotd.transport.listener import MoveListener
from snapshotd.transport.routes import MAX_ROUTES, Route, in_turn, routes_to

TWO = ["10.1.0.2:4001", "10.2.0.2:4002"]


def test_without_addresses_for_data_there_is_one_route_to_the_known_host() -> None:
    assert routes_to("node-2:7070", 4000, [], ["10.1.0.1"]) == [Route("node-2", 4000)]


def test_equally_many_addresses_are_paired_in_their_order() -> None:
    assert routes_to("10.0.0.2:7070", 4000, TWO, ["10.1.0.1", "10.2.0.1"]) == [
        Route("10.1.0.2", 4001, "10.1.0.1"),
        Route("10.2.0.2", 4002, "10.2.0.1"),
    ]


@pytest.mark.parametrize("own", [[], ["10.1.0.1"], ["10.1.0.1", "10.2.0.1", "10.3.0.1"]])
def test_otherwise_the_kernel_chooses_the_own_address(own: list[str]) -> None:
    assert [route.own for route in routes_to("10.0.0.2:7070", 4000, TWO, own)] == ["", ""]


def test_addresses_of_different_kinds_are_not_paired() -> None:
    found = routes_to("10.0.0.2:7070", 4000, ["[fd00::2]:4001", "10.2.0.2:4002"], ["10.1.0.1", "10.2.0.1"])
    assert found == [Route("fd00::2", 4001), Route("10.2.0.2", 4002, "10.2.0.1")]


@pytest.mark.parametrize(
    "announced", [["10.1.0.2"], ["elsewhere.example:80"], ["10.1.0.2:0"], ["10.1.0.2:1"] * (MAX_ROUTES + 1)]
)
def test_an_announcement_that_makes_no_sense_is_not_used(announced: list[str]) -> None:
    with pytest.raises(Internal, match="it announces"):
        routes_to("10.0.0.2:7070", 4000, announced, [])


def test_connections_are_spread_and_the_last_route_has_all_the_time() -> None:
    routes = [Route("a", 1), Route("b", 2), Route("c", 3)]
    assert [next(in_turn(routes, number))[0].host for number in range(4)] == ["a", "b", "c", "a"]
    tried = list(in_turn(routes, 1))
    assert [route.host for route, _ in tried] == ["b", "c", "a"]
    assert tried[-1][1] == sockets.CONNECT_S > tried[0][1] == tried[1][1]
    assert list(in_turn(routes[:1], 5)) == [(Route("a", 1), sockets.CONNECT_S)]


def test_a_port_is_opened_at_every_address_that_this_machine_has() -> None:
    def echo(connection: socket.socket) -> None:
        connection.sendall(connection.recv(100))

    addresses = ["127.0.0.2", "192.0.2.1", "127.0.0.3", "::1"]
    listener = MoveListener("channel under test", ["127.0.0.1"], echo, data_addresses=addresses)
    try:
        listener.start()
        routes = routes_to("127.0.0.1:1", listener.port, listener.endpoints, [])
        assert [route.host for route in routes] == ["127.0.0.2", "127.0.0.3", "::1"]
        for route in routes:
            with socket.create_connection((route.host, route.port), timeout=60) as connection:
                connection.sendall(b"here")
                assert connection.recv(100) == b"here"
    finally:
        listener.close()


def test_without_any_of_these_addresses_the_known_one_is_used() -> None:
    listener = MoveListener("channel under test", ["127.0.0.1"], lambda _: None, data_addresses=["192.0.2.1"])
    try:
        assert listener.endpoints == []
        socket.create_connection(("127.0.0.1", listener.port), timeout=60).close()
    finally:
        listener.close()
