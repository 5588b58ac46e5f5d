"""Re-pointing sockets of every kind: what stays, what is refused; one test, one property."""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path

import pytest

from snapshotd.api.errors import Refused
from snapshotd.net import rehome, repair
from snapshotd.net.flows import Address
from snapshotd.proc import tree
from tests.net.ends import connected, move_rank
from tests.net.hosts import Hosts
from tests.net.moving import hold, put_on, release, take_off

pytestmark = pytest.mark.root

SO_MEMINFO = 55
TCP, SOL = socket.IPPROTO_TCP, socket.SOL_SOCKET


def all_options(sock: socket.socket) -> dict[tuple[int, int], bytes]:
    """Everything that can be read, but for what measures time or progress."""
    changing = {(SOL, SO_MEMINFO)} | {(TCP, number) for number in (2, 11, 12, 21, 24, 26, 29, 35)}
    found = {}
    for level in (SOL, socket.IPPROTO_IP, TCP):
        for option in range(1, 90):
            if (level, option) not in changing:
                with contextlib.suppress(OSError):
                    found[level, option] = sock.getsockopt(level, option, 64)
    return found


def test_every_option_stays(hosts: Hosts, tmp_path: Path) -> None:
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
        local, remote = held.ends
        move_rank(held, hosts, hosts.h3, (local, remote.at("10.9.1.3")))
        assert all_options(held.peer) == before
        held.peer.setsockopt(SOL, repair.SO_PEEK_OFF, -1)
        assert held.peer.recv(6) == b"unread"
        held.echo()


@pytest.mark.parametrize("switch", ["tcp_window_scaling", "tcp_timestamps", "tcp_sack"])
def test_what_was_not_negotiated_stays_so(switch: str, hosts: Hosts, tmp_path: Path) -> None:
    hosts.h1.call(Path(f"/proc/sys/net/ipv4/{switch}").write_text, "0")
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        before = repair.info(held.peer)
        local, remote = held.ends
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
def test_loopback_gets_real_addresses_and_back(
    listen: str, to: str, there: tuple[str, str], peer_listens: bool, hosts: Hosts, tmp_path: Path
) -> None:
    """Both ends were on h1; the rank's goes to h3, and home again; undo of an unfinished move as well."""
    with connected(tmp_path, hosts.h1, hosts.h1, listen=listen, to=to, peer_listens=peer_listens) as held:
        old = held.ends
        new = old[0].at(there[0]), old[1].at(there[1])
        held.echo()
        hold(list(hosts), old, new)
        for ends in (new, old, new, old):
            hosts.h1.call(rehome.repoint_all, [held.change(ends)])
            assert held.ends == ends
        release(list(hosts))
        held.echo()
        move_rank(held, hosts, hosts.h3, new)
        held.echo()
        move_rank(held, hosts, hosts.h1, old)
        held.echo()


def test_several_connections_between_one_pair(hosts: Hosts, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1"))
            for _ in range(5)
        ]
        for number, held in enumerate(many):
            held.rank.sendall(b"unread %d" % number)
        goals = [(held.ends[0], held.ends[1].at("10.9.1.3")) for held in many]
        hold(list(hosts), *(held.ends for held in many), *goals)
        states = [take_off(held.rank) for held in many]
        hosts.h1.call(rehome.repoint_all, [held.change(goal) for held, goal in zip(many, goals, strict=True)])
        for held, goal, state in zip(many, goals, states, strict=True):
            held.rank = hosts.h3.call(put_on, state, socket.AF_INET, (goal[1], goal[0]))
        release(list(hosts))
        for number, held in enumerate(many):
            assert held.peer.recv(8) == b"unread %d" % number
            held.echo()


def test_an_address_that_was_bound_by_name_cannot_change(hosts: Hosts, tmp_path: Path) -> None:
    """The kernel keeps such a port with its address; the socket is as it was afterwards, and its process runs."""

    def bound(caller: socket.socket) -> None:
        caller.bind(("127.0.0.1", 4567))

    with connected(
        tmp_path, hosts.h1, hosts.h1, listen="0.0.0.0", to="127.0.0.1", peer_listens=False, before=bound
    ) as held:
        held.peer.sendall(b"unread")
        old = held.ends
        new = old[0].at("10.9.1.1"), old[1].at("10.9.1.3")
        hold([hosts.h1], old, new)
        held.rank.setblocking(True)
        with pytest.raises(Refused, match=r"bound it to 127\.0\.0\.1:4567"):
            hosts.h1.call(rehome.repoint_all, [held.change(new)])
        assert held.ends == old
        assert tree.state(held.process.pid) == "S"
        release([hosts.h1])
        assert held.rank.recv(6) == b"unread"
        held.echo()


def test_an_address_that_this_node_does_not_have(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        old = held.ends
        hold(list(hosts), old)
        with pytest.raises(Refused, match="cannot be re-pointed"):
            hosts.h1.call(rehome.repoint_all, [held.change((old[0].at("10.9.1.77"), old[1]))])
        assert held.ends == old
        release(list(hosts))
        held.echo()


def test_a_family_that_the_socket_does_not_speak(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        goal = Address("fd09:1::1", 1), Address("fd09:1::3", 2)
        with pytest.raises(Refused, match="family"):
            hosts.h1.call(rehome.repoint_all, [held.change(goal)])
        assert not held.state_path.exists()
        held.echo()


def test_half_closed_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.peer.shutdown(socket.SHUT_WR)
        local, remote = held.ends
        with pytest.raises(Refused, match="half closed"):
            hosts.h1.call(rehome.repoint_all, [held.change((local, remote.at("10.9.1.3")))])


def test_a_socket_that_is_gone_is_passed_over(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        local, remote = held.ends
        held.process.kill()
        held.process.wait()
        hosts.h1.call(rehome.repoint_all, [held.change((local, remote.at("10.9.1.3")))])
        assert held.ends == (local, remote)
