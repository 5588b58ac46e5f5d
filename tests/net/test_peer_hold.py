"""A source that reboots between the freeze and the re-point resets no connection of a peer: the peer filters it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves import rules
from snapshotd.moves.rules import Outcome
from snapshotd.net import nft
from snapshotd.net.flows import Address
from tests.net.hosts import Hosts
from tests.net.test_repoint_attacks import CONNECTS, PORT, USER, Cluster

pytestmark = pytest.mark.root

NONCE = b"n" * 32
MOVE = "m-000000000001"


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hosts, tmp_path)
    with made.serving(1, 2, 3):
        yield made


@pytest.fixture
def rank(cluster: Cluster) -> Iterator[tuple[socket.socket, Address, Address]]:
    """The rank's socket on node-1, its address, and that of the peer's socket on node-2."""
    here, there = cluster.hosts.h1, cluster.hosts.h2
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(here.call(socket.create_server, (here.ip4, PORT)))
        caller = stack.enter_context(there.python(CONNECTS, here.ip4, str(PORT), there.ip4, str(USER)))
        own = Address(there.ip4, int(caller.stdout.readline()))
        yield stack.enter_context(server.accept()[0]), Address(here.ip4, PORT), own


def reset(end: socket.socket) -> None:
    """Makes the kernel of the source send RST, as after a reboot."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def settle(cluster: Cluster, outcome: Outcome) -> None:
    token = rules.proof(NONCE, outcome, MOVE)
    assert "true" in cluster.call("Settle", pb.TokenRequest(move=MOVE, token=token))
    assert cluster.hosts.h2.call(nft.tables) == []


def test_reset_reaches_a_peer_that_has_only_suspended_its_time_outs(
    cluster: Cluster, rank: tuple[socket.socket, Address, Address]
) -> None:
    """While the rank runs its packets pass. This is how a reset would look later, too."""
    end, far, own = rank
    assert "sockets" in cluster.ask("SuspendTimeouts", (far, own), (far.at(cluster.hosts.h3.ip4), own))
    assert cluster.hosts.h2.call(nft.tables) == []
    reset(end)
    assert cluster.leads_to(own) is None


@pytest.mark.parametrize("outcome", Outcome)
def test_reset_of_a_source_that_reboots_does_not_reach_the_peer(
    cluster: Cluster, rank: tuple[socket.socket, Address, Address], outcome: Outcome
) -> None:
    """The socket stays as it is. After COMMIT it is re-pointed although Repoint was never asked for."""
    end, far, own = rank
    new = far.at(cluster.hosts.h3.ip4)
    for method in ("SuspendTimeouts", "Hold", "Hold"):
        assert "sockets" in cluster.ask(method, (far, own), (new, own))
    reset(end)
    assert cluster.leads_to(own) == far
    settle(cluster, outcome)
    assert cluster.leads_to(own) == (new if outcome is Outcome.COMMIT else far)


def test_held_connection_is_re_pointed_and_pointed_back(
    cluster: Cluster, rank: tuple[socket.socket, Address, Address]
) -> None:
    _, far, own = rank
    new = far.at(cluster.hosts.h3.ip4)
    for method in ("Hold", "Repoint", "Hold"):
        assert "sockets" in cluster.ask(method, (far, own), (new, own))
    assert cluster.leads_to(own) == new, "a late Hold changes nothing"
    settle(cluster, Outcome.ABORT)
    assert cluster.leads_to(own) == far
