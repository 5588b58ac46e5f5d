"""Re-pointing sockets of every kind: what stays, what is refused, what the clock does; one test, one property."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd import tree
from snapshotd.api.errors import Damaged, Refused
from snapshotd.net import capture, rehome, repair, timers
from snapshotd.net.flows import Address, Holder, Pair
from snapshotd.net.rehome import Change
from snapshotd.tree import Process
from tests.net.hosts import Host, Hosts
from tests.net.moving import hold, put_on, release, take_off

pytestmark = pytest.mark.root

SO_MEMINFO = 55
TCP, SOL = socket.IPPROTO_TCP, socket.SOL_SOCKET

KEEPER = """
import socket, sys
held = socket.socket(fileno=int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
"""


class Ends:
    """A connection whose one end a process that does nothing holds, beside the test, which plays its application."""

    def __init__(self, peer: socket.socket, rank: socket.socket, process: subprocess.Popen[str], folder: Path) -> None:
        self.peer, self.rank, self.process = peer, rank, process
        self.inode = os.fstat(peer.fileno()).st_ino
        owner = Process.of(process.pid)
        self.holders = (Holder(owner.pid, owner.start_ticks, peer.fileno()),)
        self.state_path = folder / str(self.inode)

    @property
    def ends(self) -> Pair:
        found = repair.pair(self.peer)
        assert found is not None
        return found

    def change(self, ends: Pair) -> Change:
        return Change(self.holders, self.inode, *ends, self.state_path)

    def echo(self) -> None:
        """Both directions work."""
        for writer, reader in ((self.peer, self.rank), (self.rank, self.peer)):
            reader.settimeout(10)
            writer.sendall(b"ping")
            assert reader.recv(4, socket.MSG_WAITALL) == b"ping"
            reader.settimeout(None)


@contextlib.contextmanager
def connected(
    folder: Path, peer: Host, rank: Host, *, listen: str, to: str, peer_listens: bool = True, before: Any = None
) -> Iterator[Ends]:
    kind = socket.AF_INET6 if ":" in listen else socket.AF_INET
    here, there = (peer, rank) if peer_listens else (rank, peer)
    with contextlib.ExitStack() as stack:
        listener = here.call(socket.create_server, (listen, 0), family=kind, dualstack_ipv6=kind == socket.AF_INET6)
        stack.enter_context(listener)
        caller = there.call(socket.socket, socket.AF_INET6 if ":" in to else socket.AF_INET)
        if before:
            before(caller)
        caller.connect((to, listener.getsockname()[1]))
        answerer = stack.enter_context(listener.accept()[0])
        stack.enter_context(caller)
        ends = (answerer, caller) if peer_listens else (caller, answerer)
        os.set_inheritable(ends[0].fileno(), True)
        argv = [sys.executable, "-I", "-c", KEEPER, str(ends[0].fileno())]
        process = stack.enter_context(peer.program(argv, pass_fds=(ends[0].fileno(),)))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        held = Ends(*ends, process, folder)
        yield held
        held.rank.close()


def move_rank(held: Ends, hosts: Hosts, target: Host, ends: Pair) -> None:
    """The rank's end to `target`, and the peer's to `ends`."""
    everyone = list(hosts)
    hold(everyone, held.ends, ends)
    state, family = take_off(held.rank), held.rank.family
    hosts.h1.call(rehome.repoint_all, [held.change(ends)])
    held.rank = target.call(
        put_on,
        state,
        family if ends[0].version == 4 or family == socket.AF_INET6 else socket.AF_INET6,
        (ends[1], ends[0]),
    )
    release(everyone)


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


def test_who_was_stopped_before_stays_stopped(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        local, remote = held.ends
        goal = local, remote.at("10.9.1.3")
        hold(list(hosts), held.ends, goal)
        held.process.send_signal(signal.SIGSTOP)
        os.waitpid(held.process.pid, os.WUNTRACED)
        hosts.h1.call(rehome.repoint_all, [held.change(goal)])
        assert held.ends == goal
        assert tree.stopped(held.process.pid)


def test_a_process_whose_socket_may_be_broken_stays_stopped(hosts: Hosts, tmp_path: Path) -> None:
    """What an earlier life of the daemon left: a stopped process, and a state that cannot be read."""
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        owner = held.holders[0].process
        (tmp_path / "stopped.json").write_text(f"[[{owner.pid}, {owner.start_ticks}]]")
        held.state_path.write_bytes(b"nonsense")
        held.process.send_signal(signal.SIGSTOP)
        os.waitpid(owner.pid, os.WUNTRACED)
        for _ in range(2):
            with pytest.raises(Damaged):
                hosts.h1.call(rehome.repoint_all, [held.change(held.ends)])
            assert tree.stopped(owner.pid)
        held.state_path.unlink()
        hosts.h1.call(rehome.repoint_all, [held.change(held.ends)])
        os.waitpid(owner.pid, os.WCONTINUED)
        assert not tree.stopped(owner.pid)
        assert list(tmp_path.iterdir()) == []


def test_a_silenced_copy_dies_without_a_word(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.rank.sendall(b"unread")  # without repair mode, closing with unread bytes is a reset
        select.select([held.peer], [], [])
        assert hosts.h1.call(rehome.silence, [held.process.pid]) == 1
        held.peer.close()
        held.process.kill()
        held.process.wait()
        assert not select.select([held.rank], [], [], 0.2)[0]
        assert hosts.h1.call(capture_of_orphans) == []


def capture_of_orphans() -> list[str]:
    """Connections in this host's tables, but for listeners."""
    rows = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    return [row for row in rows if row.split()[3] != "0A"]


def test_repair_mode_that_a_killed_criu_left(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        assert hosts.h1.call(rehome.silence, [held.process.pid]) == 1
        with pytest.raises(PermissionError):
            held.peer.recv(1, socket.MSG_DONTWAIT)
        assert hosts.h1.call(rehome.end_repair, [held.process.pid]) == 1
        assert hosts.h1.call(rehome.end_repair, [held.process.pid]) == 0
        held.echo()


def test_time_outs_are_off_for_the_pause(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.peer.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 300)
        held.peer.setsockopt(SOL, socket.SO_KEEPALIVE, 1)
        kept = timers.hold_timers(held.holders, held.inode)
        assert kept == timers.Timers(300, keepalive=True)
        hold(list(hosts), held.ends)
        held.peer.sendall(b"ping")
        # Longer than the user time-out and its next retransmission: without `hold_timers` the connection has ended by then.
        assert not select.select([held.peer], [], [], 1.0)[0]
        release(list(hosts))
        assert held.rank.recv(4) == b"ping"
        timers.restore_timers(held.holders, held.inode, kept)
        assert held.peer.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 300
        assert held.peer.getsockopt(SOL, socket.SO_KEEPALIVE) == 1
        held.peer.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 500)
        timers.restore_timers(held.holders, held.inode, kept)
        assert held.peer.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 500


@pytest.mark.parametrize("learned", [True, False])
def test_a_learned_round_trip_makes_the_silence_short(learned: bool, hosts: Hosts, tmp_path: Path) -> None:
    """A byte that is lost in the filter is sent again within milliseconds, not seconds."""
    with (
        connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held,
        hosts.h3.program([sys.executable, "-I", "-c", CLOSER]) as closer,
    ):
        assert closer.stdout is not None
        listener = Address("10.9.1.3", int(closer.stdout.readline()))
        if learned:
            assert hosts.h1.call(timers.learn_round_trip, "10.9.1.1", listener)
        local, remote = held.ends
        goal = local, remote.at("10.9.1.3")
        hold(list(hosts), held.ends, goal)
        state = take_off(held.rank)
        hosts.h1.call(rehome.repoint_all, [held.change(goal)])
        rto_us = int.from_bytes(held.peer.getsockopt(TCP, socket.TCP_INFO, 12)[8:12], "little")
        assert (rto_us <= 50_000) is learned, rto_us
        held.rank = hosts.h3.call(put_on, state, socket.AF_INET, (goal[1], goal[0]))
        held.peer.sendall(b"ping")  # lost
        release(list(hosts))
        began = time.monotonic()
        assert held.rank.recv(4) == b"ping"
        assert (time.monotonic() - began < 0.5) is learned
        assert held.peer.getsockopt(TCP, repair.TCP_RTO_MIN_US) >= 100_000


CLOSER = """
import socket
listener = socket.create_server(("0.0.0.0", 0))
print(listener.getsockname()[1], flush=True)
while True: listener.accept()[0].close()
"""


def test_segments_are_full_size_again(hosts: Hosts, tmp_path: Path) -> None:
    for listen, to, ip in (("0.0.0.0", "10.9.1.1", "10.9.1.3"), ("::", "fd09:1::1", "fd09:1::3")):
        with connected(tmp_path, hosts.h1, hosts.h2, listen=listen, to=to) as held:
            held.echo()
            before = held.peer.getsockopt(TCP, socket.TCP_MAXSEG)
            local, remote = held.ends
            move_rank(held, hosts, hosts.h3, (local, remote.at(ip)))
            held.echo()
            assert held.peer.getsockopt(TCP, socket.TCP_MAXSEG) == before > 1400
            assert held.rank.getsockopt(TCP, socket.TCP_MAXSEG) == before


def test_a_damaged_state_is_not_believed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        state = capture.begin(sock)
        capture.save(tmp_path / "s", state)
        assert capture.load(tmp_path / "s") == state
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    blob = bytearray((tmp_path / "s").read_bytes())
    for index in (0, 20, 60, len(blob) - 1):
        blob[index] ^= 1
        (tmp_path / "s").write_bytes(blob)
        with pytest.raises(Damaged):
            capture.load(tmp_path / "s")
        blob[index] ^= 1
    assert capture.load(tmp_path / "nothing") is None
