"""A node that does not answer may have any address: what could be its connections is not reset."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, Timeout
from tests.cli.conftest import Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster


def rewire(kind: pb.Rewire.Kind.ValueType) -> pb.Rewire:
    here, there = pb.Endpoint(ip="10.0.0.1", port=5), pb.Endpoint(ip="192.168.7.2", port=29500)
    return pb.Rewire(kind=kind, old_local=here, old_remote=there)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("kind", [pb.Rewire.OUTSIDE, pb.Rewire.LISTENER])
def test_connection_that_may_lead_to_a_silent_node_is_refused(
    cluster: FakeCluster, migrator: Migrator, kind: pb.Rewire.Kind.ValueType, silent: bool
) -> None:
    """Its daemon is slow: NVML hangs on a sick GPU, for example."""
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].rewires = [rewire(kind)]
    if silent:
        cluster["node-2"].failures["GetNode"] = Timeout("no answer in 5 s")
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    if silent and kind == pb.Rewire.OUTSIDE:
        assert ran.code == Refused.exit_code
        assert "outside-world: node-2 did not answer" in ran.json["reason"]
        assert "192.168.7.2" in ran.json["reason"]
        assert not cluster["spare-1"].called("Prepare")
    else:
        assert ran.code == 0


def test_network_of_the_cluster_file_that_a_node_does_not_have_is_refused(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].addresses, cluster["spare-1"].addresses = ["10.1.0.1/24"], ["10.1.0.3/24"]
    networks = '[nodes.node-1.networks]\ndata = "10.1.0.1"\n[nodes.spare-1.networks]\ndata = "10.1.0.{}"\n'
    original = cluster.path.read_text()
    cluster.path.write_text(original + networks.format(4))
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert ran.code == Refused.exit_code
    assert "new-addresses: 10.1.0.4, the address of spare-1 in the network data" in ran.json["reason"]
    assert "correct nodes.spare-1.networks.data" in ran.json["reason"]
    cluster.path.write_text(original + networks.format(3))
    assert migrator("move", "--rank", "0", "--to", "spare-1", "--json").code == 0
    (request,) = [request for method, request in cluster["node-1"].asked if method == "Inspect"]
    told = {node.name: node for node in request.nodes}
    assert dict(told["spare-1"].networks) == {"data": "10.1.0.3"}
    assert list(told["spare-1"].interfaces) == ["eth0"]
