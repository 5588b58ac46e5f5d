"""Sockets that cannot be moved are named, others are not, and the check changes nothing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from snapshotd.net import refusals
from snapshotd.net.flows import Address, Flow
from snapshotd.net.refusals import problems
from snapshotd.net.sockets import find_peers, tree_flows
from tests.net.hosts import Hosts

pytestmark = pytest.mark.root

TCP_MD5SIG, TCP_FASTOPEN_CONNECT = 14, 30


class Subject:
    """One socket on h1, first a client connected to h2; `peer` is the accepted socket, `server` its listener."""

    def __init__(self, hosts: Hosts, keep: contextlib.ExitStack) -> None:
        self.hosts, self.keep = hosts, keep
        self.server = keep.enter_context(hosts.h2.call(socket.create_server, (hosts.h2.ip4, 0)))
        self.sock = self.connect()
        self.peer = keep.enter_context(self.server.accept()[0])

    def connect(self) -> socket.socket:
        return self.keep.enter_context(self.hosts.h1.call(socket.create_connection, self.server.getsockname(), 2.0))

    def replace(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """Replaces the subject by a new socket on h1."""
        self.sock = self.keep.enter_context(self.hosts.h1.call(socket.socket, family, kind, protocol))
        return self.sock

    def listen(self) -> socket.socket:
        self.replace().bind((self.hosts.h1.ip4, 0))
        self.sock.listen()
        return self.sock

    def flow(self) -> Flow:
        flows = self.hosts.h1.call(tree_flows, [os.getpid()])
        (found,) = (flow for flow in flows if any(holder.fd == self.sock.fileno() for holder in flow.holders))
        return found

    def reasons(self) -> list[tuple[str, bool]]:
        return [(problem.reason, problem.passing) for problem in self.hosts.h1.call(problems, [self.flow()])]

    def settle(self, state: str) -> None:
        deadline = time.monotonic() + 5
        while self.flow().state != state:
            assert time.monotonic() < deadline, f"{self.flow()} never became {state}"


@pytest.fixture
def subject(hosts: Hosts) -> Iterator[Subject]:
    with contextlib.ExitStack() as keep:
        yield Subject(hosts, keep)


def test_plain_sockets_are_accepted(subject: Subject) -> None:
    subject.peer.sendall(b"unread")
    subject.sock.sendall(b"unread too")
    assert subject.reasons() == []
    subject.listen()
    assert subject.reasons() == []
    subject.replace()
    assert subject.reasons() == []


def half_closed_by_us(subject: Subject) -> None:
    subject.sock.shutdown(socket.SHUT_WR)
    subject.settle("fin-wait-2")


def half_closed_by_them(subject: Subject) -> None:
    subject.peer.shutdown(socket.SHUT_WR)
    subject.settle("close-wait")


def shut_for_reading(subject: Subject) -> None:
    subject.sock.shutdown(socket.SHUT_RD)


def urgent(subject: Subject) -> None:
    subject.peer.send(b"!", socket.MSG_OOB)
    poll = select.poll()
    poll.register(subject.sock, select.POLLPRI)
    assert poll.poll(5000)


def reset(subject: Subject) -> None:
    subject.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    subject.peer.close()
    subject.settle("close")


def connecting(subject: Subject) -> None:
    subject.replace().setblocking(False)
    with contextlib.suppress(BlockingIOError):
        subject.sock.connect(("10.9.1.99", 80))  # an unused address


def fast_open(subject: Subject) -> None:
    subject.replace().setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)


def signed(subject: Subject) -> None:
    peer = struct.pack("=HH4s120x", socket.AF_INET, 0, socket.inet_aton(subject.hosts.h2.ip4))
    subject.listen().setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG, peer + struct.pack("BBHi80s", 0, 0, 3, 0, b"key"))


def waiting(subject: Subject) -> None:
    name = subject.listen().getsockname()
    subject.keep.enter_context(subject.hosts.h2.call(socket.create_connection, name, 2.0))


def datagrams(subject: Subject) -> None:
    subject.replace(kind=socket.SOCK_DGRAM).bind(("0.0.0.0", 0))


def multipath(subject: Subject) -> None:
    subject.replace(protocol=262)


def packets(subject: Subject) -> None:
    subject.replace(socket.AF_PACKET, socket.SOCK_RAW)


def of_another_host(subject: Subject) -> None:
    subject.sock = subject.server


@pytest.mark.parametrize(
    ("arrange", "reason", "passing"),
    [
        (half_closed_by_us, "half-closed: the rank has closed", False),
        (half_closed_by_them, "half-closed: the peer has closed", False),
        (shut_for_reading, "half-closed: shut down for read", False),
        (urgent, "urgent data", True),
        (connecting, "still connecting", True),
        (fast_open, "Fast Open", True),
        (signed, "TCP-MD5", False),
        (waiting, "1 connections wait", True),
        (datagrams, "a UDP port", False),
        (multipath, "Multipath TCP", False),
        (packets, "a packet socket", False),
        (of_another_host, "another network namespace", False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reason_is_named(subject: Subject, arrange: Callable[[Subject], None], reason: str, passing: bool) -> None:
    arrange(subject)
    (found,) = subject.reasons()
    assert reason in found[0]
    assert found[1] is passing
    assert subject.reasons() == [found]


def test_reset_that_was_not_noticed_is_no_problem_and_stays_for_the_application(subject: Subject) -> None:
    reset(subject)
    subject.settle("close")
    assert subject.reasons() == []
    assert refusals.was_reset(subject.flow(), subject.sock)
    with pytest.raises(ConnectionResetError):
        subject.sock.recv(1)
    assert not refusals.was_reset(subject.flow(), subject.sock)


@pytest.mark.parametrize("arrange", [half_closed_by_us, half_closed_by_them, shut_for_reading])
def test_half_closed_connection_is_marked_as_such(subject: Subject, arrange: Callable[[Subject], None]) -> None:
    arrange(subject)
    (problem,) = problems([subject.flow()])
    assert problem.half_closed


def test_half_closed_connection_is_looked_at_more_closely(subject: Subject) -> None:
    """It may move all the same."""
    urgent(subject)
    half_closed_by_them(subject)
    found = subject.hosts.h1.call(problems, [subject.flow()])
    assert [(problem.half_closed, problem.reason) for problem in found] == [
        (True, "half-closed: the peer has closed its side"),
        (False, "unread urgent data"),
    ]


def test_connection_that_was_not_accepted_is_refused(subject: Subject) -> None:
    late = subject.connect()
    pair = Address(*late.getsockname()), Address(*late.getpeername())
    (problem,) = problems(subject.hosts.h2.call(find_peers, [pair]).values())
    assert problem.reason == "it was not accepted yet"


def test_unbound_or_connected_datagram_socket_is_accepted(subject: Subject) -> None:
    subject.replace(kind=socket.SOCK_DGRAM)
    assert subject.reasons() == []
    subject.sock.connect((subject.hosts.h2.ip4, 53))
    assert subject.reasons() == []


def test_link_local_address_is_refused() -> None:
    listener = Flow("tcp", "inet6", "listen", Address("fe80::1", 80), None, 1)
    assert [problem.reason for problem in problems([listener])] == [
        "a link-local address, which is valid on one node alone"
    ]
