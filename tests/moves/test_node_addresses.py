"""What proves that an address belongs to a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrator import pki
from snapshotd.moves.peers import node_addresses
from snapshotd.moves.peers.node_addresses import NodeAddresses
from snapshotd.runtime.blocking import in_thread
from tests.served import Certificates, credentials, serve_in

#: Addresses of this machine at which no daemon listens.
OTHER, NAMED = "127.0.0.9", "127.0.0.8"


@pytest.fixture
def cluster(tmp_path: Path) -> Certificates:
    """node-1, which serves and whose certificate names NAMED, and node-2, which asks."""
    pki.init(tmp_path / "ca")
    served = credentials(pki.issue_node(tmp_path / "ca", "node-1", [NAMED]))
    asking = credentials(pki.issue_node(tmp_path / "ca", "node-2"))
    return Certificates(served, asking, asking, asking, asking)


@pytest.mark.parametrize(
    ("ip", "node", "proved"),
    [
        ("127.0.0.1", "node-1", True),  # its daemon answers there
        (NAMED, "node-1", True),
        (OTHER, "node-1", False),
        ("127.0.0.1", "node-3", False),  # another node's daemon answers there
        (
            NAMED,
            "node-3",
            False,
        ),  # as if node-3 passed the connection on to node-1, whose certificate names the address
    ],
)
async def test_address_is_proved_by_the_certificate_of_its_node(
    tmp_path: Path, cluster: Certificates, ip: str, node: str, proved: bool
) -> None:
    async with serve_in(tmp_path, cluster, linked=False)(lambda services: None) as served:
        proofs = NodeAddresses(cluster.other_node)
        assert await in_thread(proofs.belongs, ip, node, served.endpoint) is proved


async def test_revoked_certificate_proves_nothing(tmp_path: Path, cluster: Certificates) -> None:
    async with serve_in(tmp_path, cluster, linked=False)(lambda services: None) as served:
        assert await in_thread(NodeAddresses(cluster.other_node).belongs, NAMED, "node-1", served.endpoint)
        pki.revoke(tmp_path / "ca", "node:node-1")
        assert not await in_thread(NodeAddresses(cluster.other_node).belongs, NAMED, "node-1", served.endpoint)


async def test_proof_expires(tmp_path: Path, cluster: Certificates) -> None:
    now_s = [0.0]
    proofs = NodeAddresses(cluster.other_node, lambda: now_s[0])
    async with serve_in(tmp_path, cluster, linked=False)(lambda services: None) as served:
        assert await in_thread(proofs.belongs, "127.0.0.1", "node-1", served.endpoint)
    now_s[0] = node_addresses.VALID_S - 1
    assert await in_thread(proofs.belongs, "127.0.0.1", "node-1", served.endpoint)
    now_s[0] = node_addresses.VALID_S + 1
    assert not await in_thread(proofs.belongs, "127.0.0.1", "node-1", served.endpoint)


async def test_endpoint_that_is_none_proves_nothing(tmp_path: Path, cluster: Certificates) -> None:
    assert not await in_thread(NodeAddresses(cluster.other_node).belongs, OTHER, "node-1", "no endpoint")
