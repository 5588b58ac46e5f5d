"""The path that a connection will take is tried before its rank is frozen, and what does not pass is named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.diagnosis.probes import OPEN_S
from snapshotd.net import nft, sockets
from tests.net.forwarding_node import PORT as DAEMON_PORT
from tests.net.hosts import Hosts
from tests.net.test_repoint_attacks import USER, Cluster

pytestmark = pytest.mark.root

RULES = """
add table inet site
add chain inet site arriving {{ type filter hook input priority 0 ; policy accept ; }}
add rule inet site arriving {rule}
"""
PORTS = f"tcp dport 32768-60999 tcp sport != {DAEMON_PORT}"  # not what daemons answer
CLOSED = f"{PORTS} drop"
NO_LARGE_PACKETS = f"{PORTS} meta length > 1000 drop"
STATEFUL = f"{PORTS} tcp flags & (fin | syn | rst | ack) != syn ct state new drop"
STRICT = f"{PORTS} tcp flags & (fin | syn | rst | ack) != syn ct state new reject with tcp reset"


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hosts, tmp_path)
    with made.serving(1, 2, 3):
        yield made


def refusals(cluster: Cluster) -> dict[str, str]:
    """The refusals of node-2, by name, if its connection to the rank on node-1 is to lead to node-3."""
    h1, _, h3 = (host.ip4 for host in cluster.hosts)
    with cluster.connection(1, h1, USER) as (own, far):
        checks = json.loads(cluster.ask("InspectConnections", (far, own), (far.at(h3), own)))["checks"]
        assert cluster.leads_to(own) == far
    return {check["name"]: check["reason"] for check in checks if check.get("verdict") == "REFUSE"}


def left(cluster: Cluster) -> list[str]:
    """Open sockets of the attempt. The daemons' own connections lead to their port."""
    return [
        str(flow)
        for host in (cluster.hosts.h2, cluster.hosts.h3)
        for flow in host.call(sockets._all_rows, {"tcp"})
        if flow.state in ("listen", "established", "syn-sent", "close-wait")
        and DAEMON_PORT not in (flow.local.port, flow.remote.port if flow.remote else DAEMON_PORT)
    ] + [str(flow) for flow in cluster.hosts.h3.call(sockets.listeners) if flow.local.port != DAEMON_PORT]


def test_free_path_is_accepted_and_its_ports_are_closed_at_once(cluster: Cluster) -> None:
    assert refusals(cluster) == {}
    deadline = time.monotonic() + OPEN_S - 5  # before they would be closed anyway
    while found := left(cluster):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.sampled(1)  # each waits for packets that never arrive
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (CLOSED, "a connection to port"),
        (NO_LARGE_PACKETS, "32 KiB do not arrive: the MTU of the path may be too small"),
        (STATEFUL, "a firewall that tracks connections drops them"),
        (STRICT, "a firewall that tracks connections answers them"),
    ],
    ids=["closed", "mtu", "stateful", "rejecting"],
)
def test_what_does_not_pass_is_named_with_both_addresses(cluster: Cluster, rule: str, said: str) -> None:
    here, there = cluster.hosts.h2.ip4, cluster.hosts.h3.ip4
    cluster.hosts.h3.call(nft.apply, RULES.format(rule=rule))
    found = refusals(cluster)
    assert list(found) == ["connection-paths"]
    assert f"{here} → {there} (node-3): " in found["connection-paths"]
    assert said in found["connection-paths"]
