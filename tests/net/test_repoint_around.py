"""Around re-pointing: stopped processes, time-outs, the death of a copy, and damaged state files."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged
from snapshotd.net import repair, repoint, socket_state, sockets, timers
from snapshotd.net.flows import Address
from snapshotd.proc import tree
from tests.net.connections import connected, move_rank
from tests.net.hosts import Hosts
from tests.net.moving import hold, put_on, release, take_off

pytestmark = pytest.mark.root

TCP, SOL = socket.IPPROTO_TCP, socket.SOL_SOCKET

CLOSER = """
import socket
listener = socket.create_server(("0.0.0.0", 0))
print(listener.getsockname()[1], flush=True)
while True: listener.accept()[0].close()
"""


def test_process_stopped_before_stays_stopped(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        local, remote = held.endpoints
        goal = local, remote.at("10.9.1.3")
        hold(list(hosts), held.endpoints, goal)
        held.process.send_signal(signal.SIGSTOP)
        os.waitpid(held.process.pid, os.WUNTRACED)
        hosts.h1.call(repoint.repoint_all, [held.change(goal)])
        assert held.endpoints == goal
        assert tree.stopped(held.process.pid)


def test_process_with_a_broken_socket_stays_stopped(hosts: Hosts, tmp_path: Path) -> None:
    """A crash left a stopped process and an unreadable state file."""
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        owner = held.holders[0].process
        (tmp_path / "stopped.json").write_text(f"[[{owner.pid}, {owner.start_ticks}]]")
        held.state_path.write_bytes(b"nonsense")
        held.process.send_signal(signal.SIGSTOP)
        os.waitpid(owner.pid, os.WUNTRACED)
        for _ in range(2):
            with pytest.raises(Damaged):
                hosts.h1.call(repoint.repoint_all, [held.change(held.endpoints)])
            assert tree.stopped(owner.pid)
        held.state_path.unlink()
        hosts.h1.call(repoint.repoint_all, [held.change(held.endpoints)])
        os.waitpid(owner.pid, os.WCONTINUED)
        assert not tree.stopped(owner.pid)
        assert list(tmp_path.iterdir()) == []


def test_silenced_copy_dies_without_a_packet(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.rank.sendall(b"unread")  # without repair mode, closing with unread bytes is a reset
        select.select([held.peer], [], [])
        assert hosts.h1.call(repoint.silence, [held.process.pid]) == 1
        held.peer.close()
        held.process.kill()
        held.process.wait()
        assert not select.select([held.rank], [], [], 0.2)[0]
        assert hosts.h1.call(connections_here) == []


def connections_here() -> list[str]:
    """Connections in this host's tables, without listeners."""
    rows = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    return [row for row in rows if row.split()[3] != "0A"]


def test_repair_mode_left_by_a_killed_criu_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        assert hosts.h1.call(repoint.silence, [held.process.pid]) == 1
        with pytest.raises(PermissionError):
            held.peer.recv(1, socket.MSG_DONTWAIT)
        assert hosts.h1.call(repoint.end_repair, [held.process.pid], []) == 1
        assert hosts.h1.call(repoint.end_repair, [held.process.pid], []) == 0
        held.echo()


@pytest.mark.parametrize("value", [0, 1])
def test_repair_mode_left_by_a_killed_criu_does_not_cost_so_reuseaddr(hosts: Hosts, tmp_path: Path, value: int) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.peer.setsockopt(SOL, socket.SO_REUSEADDR, value)
        pids = [held.process.pid]
        before = repoint.with_reuse_address(hosts.h1.call(sockets.tree_flows, pids))
        assert hosts.h1.call(repoint.silence, pids) == 1
        assert hosts.h1.call(repoint.end_repair, pids, before) == 1
        assert held.peer.getsockopt(SOL, socket.SO_REUSEADDR) == value
        # criu was killed when it had left repair mode, and had not yet set the option again
        held.peer.setsockopt(SOL, socket.SO_REUSEADDR, 0)
        assert hosts.h1.call(repoint.end_repair, pids, before) == 0
        assert held.peer.getsockopt(SOL, socket.SO_REUSEADDR) == value


def test_time_outs_are_off_during_the_pause(hosts: Hosts, tmp_path: Path) -> None:
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.peer.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 300)
        held.peer.setsockopt(SOL, socket.SO_KEEPALIVE, 1)
        kept = timers.hold_timers(held.holders, held.inode)
        assert kept == timers.Timers(300, keepalive=True)
        hold(list(hosts), held.endpoints)
        held.peer.sendall(b"ping")
        # Longer than the user time-out and its next retransmission: without `hold_timers` the connection would have ended.
        assert not select.select([held.peer], [], [], 1.0)[0]
        release(list(hosts))
        assert held.rank.recv(4) == b"ping"
        timers.restore_timers(held.holders, held.inode, kept)
        assert held.peer.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 300
        assert held.peer.getsockopt(SOL, socket.SO_KEEPALIVE) == 1
        held.peer.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 500)
        timers.restore_timers(held.holders, held.inode, kept)
        assert held.peer.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 500


@pytest.mark.parametrize("here", [False, True], ids=["retransmits", "probes"])
def test_time_outs_count_again_only_after_the_next_attempt(hosts: Hosts, tmp_path: Path, here: bool) -> None:
    """It is the later the longer the connection was filtered, on this node or on another. A time-out that is restored
    earlier would end the connection then."""
    with connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held:
        held.echo()
        held.peer.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 300)
        kept = timers.hold_timers(held.holders, held.inode)
        assert kept is not None
        where = [hosts.h1 if here else hosts.h2]
        hold(where, held.endpoints)
        held.peer.sendall(b"ping")
        while timers.attempts_again_in_s(held.peer) < 1.5:
            time.sleep(0.01)
        release(where)
        held.rank.settimeout(30)
        timers.await_answers([(held.holders, held.inode, kept)], 0.2)
        timers.restore_timers(held.holders, held.inode, kept)
        assert held.rank.recv(4) == b"ping"
        held.echo()


@pytest.mark.parametrize("learned", [True, False])
def test_learned_round_trip_makes_retransmission_prompt(learned: bool, hosts: Hosts, tmp_path: Path) -> None:
    """A byte lost in the filter is sent again within milliseconds, not seconds."""
    with (
        connected(tmp_path, hosts.h1, hosts.h2, listen="0.0.0.0", to="10.9.1.1") as held,
        hosts.h3.program([sys.executable, "-I", "-c", CLOSER]) as closer,
    ):
        assert closer.stdout is not None
        listener = Address("10.9.1.3", int(closer.stdout.readline()))
        if learned:
            assert hosts.h1.call(timers.learn_round_trip, "10.9.1.1", listener)
        local, remote = held.endpoints
        goal = local, remote.at("10.9.1.3")
        hold(list(hosts), held.endpoints, goal)
        state = take_off(held.rank)
        hosts.h1.call(repoint.repoint_all, [held.change(goal)])
        rto_us = int.from_bytes(held.peer.getsockopt(TCP, socket.TCP_INFO, 12)[8:12], "little")
        assert (rto_us <= 50_000) is learned, rto_us
        if not learned:
            return  # it would be sent again after 3 s
        held.rank = hosts.h3.call(put_on, state, socket.AF_INET, (goal[1], goal[0]))
        held.peer.sendall(b"ping")  # lost
        release(list(hosts))
        began = time.monotonic()
        assert held.rank.recv(4) == b"ping"
        assert time.monotonic() - began < 2.5
        assert held.peer.getsockopt(TCP, repair.TCP_RTO_MIN_US) >= 100_000


def test_segments_are_full_size_again(hosts: Hosts, tmp_path: Path) -> None:
    for listen, to, ip in (("0.0.0.0", "10.9.1.1", "10.9.1.3"), ("::", "fd09:1::1", "fd09:1::3")):
        with connected(tmp_path, hosts.h1, hosts.h2, listen=listen, to=to) as held:
            held.echo()
            before = held.peer.getsockopt(TCP, socket.TCP_MAXSEG)
            local, remote = held.endpoints
            move_rank(held, hosts, hosts.h3, (local, remote.at(ip)))
            held.echo()
            assert held.peer.getsockopt(TCP, socket.TCP_MAXSEG) == before > 1400
            assert held.rank.getsockopt(TCP, socket.TCP_MAXSEG) == before


def test_damaged_state_file_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        state = socket_state.begin(sock)
        socket_state.save(tmp_path / "s", state)
        assert socket_state.load(tmp_path / "s") == state
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    blob = bytearray((tmp_path / "s").read_bytes())
    for index in (0, 20, 60, len(blob) - 1):
        blob[index] ^= 1
        (tmp_path / "s").write_bytes(blob)
        with pytest.raises(Damaged):
            socket_state.load(tmp_path / "s")
        blob[index] ^= 1
    assert socket_state.load(tmp_path / "nothing") is None
