"""Re-points sockets of every kind: what is preserved and what is refused."""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path

import pytest

from snapshotd.api.errors import Refused
from snapshotd.net import repair, repoint
from snapshotd.net.flows import Address
from snapshotd.proc import tree
from tests.net.connections import connected, move_rank
from tests.net.hosts import Hosts
from tests.net.moving import hold, put_on, release, take_off

pytestmark = pytest.mark.root

SO_MEMINFO = 55
TCP, SOL = socket.IPPROTO_TCP, socket.SOL_SOCKET


def all_options(sock: socket.socket) -> dict[tuple[int, int], bytes]:
    """All readable options except those that measure time or progress."""
    changing = {(SOL, SO_MEMINFO)} | {(TCP, number) for number in (2, 11, 12, 21, 24, 26, 29, 35)}
    found = {}
    for level in (SOL, socket.IPPROTO_IP, TCP):
        for option in range(1, 90):
            if (level, option) not in changing:
                with contextlib.suppress(OSError):
                    found[level, option] = sock.getsockopt(level, option, 64)
    return found


def test_every_option_is_preserved(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        for level, option, value in (
            (SOL, socket.SO_REUSEADDR, 1),
            (SOL, socket.SO_KEEPALIVE, 1),
            (SOL, socket.SO_RCVBUF, 70000),
            (SOL, socket.SO_PRIORITY, 3),
            (SOL, socket.SO_MARK, 7),
            (SOL, repair.SO_PEEK_OFF, 2),
            (TCP, socket.TCP_NODELAY, 1),
            (TCP, socket.TCP_KEEPIDLE, 77),
            (TCP, socket.TCP_USER_TIMEOUT, 12345),
            (TCP, socket.TCP_WINDOW_CLAMP, 50000),
            (TCP, socket.TCP_NOTSENT_LOWAT, 99999),
            (TCP, repair.TCP_RTO_MIN_US, 48000),
            (socket.IPPROTO_IP, socket.IP_TOS, 0x10),
        ):
            held.peer.setsockopt(level, option, value)
        held.peer.setsockopt(SOL, socket.SO_LINGER, b"\1\0\0\0\5\0\0\0")
        held.peer.setsockopt(TCP, socket.TCP_CONGESTION, b"reno")
        held.rank.sendall(b"unread")
        select.select([held.peer], [], [])
        before = all_options(held.peer)
        local, remote = held.endpoints
        move_rank(held, hosts, hosts.h3, (local, remote.at("10.9.1.3")))
        assert all_options(held.peer) == before
        held.peer.setsockopt(SOL, repair.SO_PEEK_OFF, -1)
        assert held.peer.recv(6) == b"unread"
        held.echo()


@pytest.mark.parametrize("switch", ["tcp_window_scaling", "tcp_timestamps", "tcp_sack"])
def test_options_that_were_not_negotiated_stay_off(switch: str, hosts: Hosts, tmp_path: Path) -> None:
    hosts.h1.call(Path(f"/proc/sys/net/ipv4/{switch}").write_text, "0")
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        before = repair.info(held.peer)
        local, remote = held.endpoints
        move_rank(held, hosts, hosts.h3, (local, remote.at("10.9.1.3")))
        assert repair.info(held.peer) == before
        held.echo()


@pytest.mark.parametrize(
    ("listen", "to", "there", "peer_listens"),
    [
        ("0.0.0.0", "127.0.0.1", ("10.9.1.1", "10.9.1.3"), True),
        ("0.0.0.0", "127.0.0.1", ("10.9.1.1", "10.9.1.3"), False),
        ("::", "::1", ("fd09:1::1", "fd09:1::3"), True),
        ("::", "::1", ("10.9.1.1", "10.9.1.3"), True),
        ("::", "::1", ("10.9.1.1", "10.9.1.3"), False),
        ("::", "127.0.0.1", ("10.9.1.1", "10.9.1.3"), True),
    ],
)
def test_loopback_connection_gets_real_addresses_and_back(
    listen: str, to: str, there: tuple[str, str], peer_listens: bool, hosts: Hosts, tmp_path: Path
) -> None:
    """Both sockets are on h1; the rank's moves to h3 and back. Also the undo of an unfinished move."""
    with connected(tmp_path, hosts.h1, hosts.h1, listen=listen, to=to, peer_listens=peer_listens) as held:
        old = held.endpoints
        new = old[0].at(there[0]), old[1].at(there[1])
        held.echo()
        hold(list(hosts), old, new)
        for endpoints in (new, old, new, old):
            hosts.h1.call(repoint.repoint_all, [held.change(endpoints)])
            assert held.endpoints == endpoints
        release(list(hosts))
        held.echo()
        move_rank(held, hosts, hosts.h3, new)
        held.echo()
        move_rank(held, hosts, hosts.h1, old)
        held.echo()


def test_several_connections_are_re_pointed_at_once(hosts: Hosts, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1"))
            for _ in range(5)
        ]
        for number, held in enumerate(many):
            held.rank.sendall(b"unread %d" % number)
        goals = [(held.endpoints[0], held.endpoints[1].at("10.9.1.3")) for held in many]
        hold(list(hosts), *(held.endpoints for held in many), *goals)
        states = [take_off(held.rank) for held in many]
        hosts.h1.call(repoint.repoint_all, [held.change(goal) for held, goal in zip(many, goals, strict=True)])
        for held, goal, state in zip(many, goals, states, strict=True):
            held.rank = hosts.h3.call(put_on, state, socket.AF_INET, (goal[1], goal[0]))
        release(list(hosts))
        for number, held in enumerate(many):
            assert held.peer.recv(8) == b"unread %d" % number
            held.echo()


def test_explicitly_bound_address_cannot_change(hosts: Hosts, tmp_path: Path) -> None:
    """The kernel locks such a port to its address. The socket is unchanged afterwards, and its process runs."""

    def bound(caller: socket.socket) -> None:
        caller.bind(("127.0.0.1", 4567))

    with connected(
        tmp_path, hosts.h1, hosts.h1, listen="0.0.0.0", to="127.0.0.1", peer_listens=False, before=bound
    ) as held:
        held.peer.sendall(b"unread")
        old = held.endpoints
        new = old[0].at("10.9.1.1"), old[1].at("10.9.1.3")
        hold([hosts.h1], old, new)
        held.rank.setblocking(True)
        with pytest.raises(Refused, match=r"bound it to 127\.0\.0\.1:4567"):
            hosts.h1.call(repoint.repoint_all, [held.change(new)])
        assert held.endpoints == old
        assert tree.state(held.process.pid) == "S"
        release([hosts.h1])
        assert held.rank.recv(6) == b"unread"
        held.echo()


def test_address_of_another_node_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        old = held.endpoints
        hold(list(hosts), old)
        with pytest.raises(Refused, match="cannot be re-pointed"):
            hosts.h1.call(repoint.repoint_all, [held.change((old[0].at("10.9.1.77"), old[1]))])
        assert held.endpoints == old
        release(list(hosts))
        held.echo()


def test_address_of_another_family_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        goal = Address("fd09:1::1", 1), Address("fd09:1::3", 2)
        with pytest.raises(Refused, match="family"):
            hosts.h1.call(repoint.repoint_all, [held.change(goal)])
        assert not held.state_path.exists()
        held.echo()


def test_half_closed_connection_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.peer.shutdown(socket.SHUT_WR)
        local, remote = held.endpoints
        with pytest.raises(Refused, match="half closed"):
            hosts.h1.call(repoint.repoint_all, [held.change((local, remote.at("10.9.1.3")))])


def test_socket_that_is_gone_is_skipped(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        local, remote = held.endpoints
        held.process.kill()
        held.process.wait()
        hosts.h1.call(repoint.repoint_all, [held.change((local, remote.at("10.9.1.3")))])
        assert held.endpoints == (local, remote)
